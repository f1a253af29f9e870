"""The Target of adt_tree made of a decoder: its cache, its range of codes, its prompts.

Dimensions: G guidance branches, B slots, R = G * B rows (row g * B + b is slot b in branch g), N nodes, A
path nodes, T rows of a prefix, V codes, D features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.errors import NoRoom, UserError, shown
from adt_tree.grid import Grid
from adt_tree.padding import Padding
from adt_tree.roles import Prefix, Run, Scored, run_directly
from adt_tree.tree import DraftTree, to_device
from adt_tree.verify import Verdict
from models.cell_tokens import CellIds, CellTokens
from models.decoder.cache import KVCache
from models.decoder.packed import cache_dtype
from models.decoder.positions import AxisPositions
from models.decoder.transformer import Decoder, Join, as_it_is, join, logits_of
from models.image_tokens import ImageTokens


@dataclass(frozen=True, slots=True)
class EmbeddedPrefix:
    """The prefix of one guidance branch, embedded. The decoder predicts the first code at its last row."""

    rows: Tensor  # [1, T, D]
    mask: Tensor  # [1, T, T] bool: which rows each row attends to
    padding: int = 0  # number of leading rows that no later row attends to; the cache leaves them out

    def equals(self, other: EmbeddedPrefix) -> bool:
        """Returns whether a pass over the other prefix computes the same."""
        return torch.equal(self.rows, other.rows) and torch.equal(self.mask, other.mask)


class EncodedPrompt(Protocol):
    """The prompt of one image, in both guidance branches. Branch 0 is the conditional one."""

    @property
    def length(self) -> int:
        """Number of rows of the longer prefix."""

    def embed(self, branch: int, decoder: Decoder) -> EmbeddedPrefix:
        """Returns the prefix of a branch."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what of the user's text the prompt leaves out."""

    def tokens(self, branch: int) -> list[int]:
        """Returns one token id for every row of a branch. A drafter embeds them beside the rows' features."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """An EncodedPrompt of token ids."""

    conditional: list[int]
    unconditional: list[int] | None  # None: the model has no such branch
    warnings: ClassVar[tuple[str, ...]] = ()

    @property
    def length(self) -> int:
        return max(len(self.conditional), len(self.unconditional or ()))

    def embed(self, branch: int, decoder: Decoder) -> EmbeddedPrefix:
        tokens = torch.tensor([self.tokens(branch)], device=decoder.embed.weight.device)
        return EmbeddedPrefix(decoder.embed(tokens), chain_mask(tokens.shape[1], tokens.device))

    def tokens(self, branch: int) -> list[int]:
        if not branch:
            return self.conditional
        assert self.unconditional is not None, "Model.target refuses guidance without such a branch"
        return self.unconditional


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """The text side of a model, and where its codes lie among its tokens."""

    encode: Callable[[str], EncodedPrompt]  # the user's text -> the prompt that prefill() takes; see __call__
    cells: CellIds
    guided: bool = True  # true if prompts have an unconditional branch
    images: ImageTokens | None = None  # images among the ids of prompts that a client has encoded
    num_classes: int = 0  # classes of a class-conditional model, whose prompts are class ids; 0: texts
    release: Callable[[], None] = lambda: None  # frees the memory that only encoding needs
    control: tuple[str, ...] = ()  # texts that the tokenizer would read as control tokens

    def __call__(self, text: str) -> EncodedPrompt:
        """Returns the prompt of a user's text. UserError for a text that is blank, that is not Unicode, or
        that the model would not read as text alone."""
        if not text.strip():
            raise UserError(f"prompt {shown(text)}: it is blank; give a text")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(f"prompt {ascii(text)[:60]}: it is not Unicode text (a lone surrogate)")
        if held := next((token for token in self.control if token in text), None):
            raise UserError(f"prompt {shown(text)}: {held} is a control token of this model; leave it out")
        return self.encode(text)


def token_prompts(cells: CellIds, guided: bool = True) -> PromptEncoder:
    """Returns the text side of a model without a tokenizer: prompts are token ids, texts are refused."""

    def encode(text: str) -> EncodedPrompt:
        raise UserError(f"prompt {text[:80]!r}: this model has no tokenizer, give token ids")

    return PromptEncoder(encode, cells, guided)


def by_branch(x: Tensor, branches: int) -> Tensor:
    """Repeats x [B, ...] for every guidance branch: [G * B, ...]. All branches score the same tree."""
    return x.repeat(branches, *([1] * (x.dim() - 1)))


def chain_mask(length: int, device: torch.device) -> Tensor:
    """Returns the ancestor mask of a chain, [1, T, T] bool: every node attends to itself and all before."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


@dataclass(frozen=True, slots=True)
class Execution:
    """How a target computes its passes. It changes no image beyond rounding."""

    # Records the parts of a step and replays them, so that passes are rounded up to few shapes; None: calls
    # them directly.
    run: Run | None = None
    compile: Callable[[Any], Any] = as_it_is  # or transformer.compiled()


DIRECT = Execution()


class ARTarget:
    """The Target made of a decoder. Rows may have prefixes of different lengths; the cache holds no padding.

    The decoder's head scores the codes alone (Decoder.cut_head). The cache has max_prompt + grid.length +
    max_nodes entries a row; nothing grows while decoding.
    """

    def __init__(
        self,
        decoder: Decoder,
        grid: Grid,
        ids: CellIds,
        slots: int,
        branches: int,
        max_prompt: int,
        max_nodes: int,
        execution: Execution = DIRECT,
    ) -> None:
        """ids: token ids of the cells. branches: 2 under guidance, else 1. max_nodes: nodes of the
        largest tree, with the root. Raises UserError if the decoder has too few positions."""
        self.run = execution.run or run_directly
        self.padding = Padding(execution.run is not None, grid.length, max_prompt)
        max_nodes = self.padding.nodes(max_nodes)
        weight = decoder.embed.weight
        self.decoder, self.grid, self.slots = decoder, grid, slots
        self.ids, self.num_codes = ids, len(ids.codes)
        self.branches, self.max_prompt = branches, max_prompt
        self._prompts = [0] * slots  # rows of the prompt in each slot
        # The unconditional prefix computed last, its entries of the cache, and its features.
        self._unconditional: tuple[EmbeddedPrefix, Tensor, Tensor] | None = None
        self.compile = execution.compile
        self.join: Join = self.compile(join)
        self.device = weight.device
        config = decoder.config
        capacity = max_prompt + grid.length + max_nodes
        # Some checkpoints state fewer positions than their images have codes. Such a limit is ignored.
        if capacity > config.max_positions >= grid.length:
            raise NoRoom(
                f"{max_prompt} prompt tokens, {grid.length} cells and a tree of {max_nodes} nodes need "
                f"{capacity} positions; the model has {config.max_positions}: shorten the prompt or the tree"
            )
        decoder.reserve(capacity)
        rows, dtype = branches * slots, cache_dtype(weight)
        axes = None
        if config.rope_sections:
            axes = AxisPositions.allocate(grid, max_prompt, capacity, rows, self.device)
        padded, few = config.padded_prefix, self.padding.few
        self.cache = KVCache.allocate(config, rows, capacity, dtype, self.device, padded, axes, few)
        self._cells = CellTokens(grid, ids, slots, self.device)

    def prefill(self, prompts: Mapping[int, EncodedPrompt]) -> dict[int, Prefix]:
        """Takes a pass for all conditional prefixes of one length, as padding would change the last bits, and
        one for an unconditional prefix unless it equals the last one: most families have one for all prompts.
        Raises ValueError for a prompt longer than max_prompt."""
        if (longest := max(prompt.length for prompt in prompts.values())) > self.max_prompt:
            raise ValueError(f"a prompt of {longest} tokens; the cache was sized for {self.max_prompt}")
        features = {slot: list[Tensor]() for slot in prompts}
        for branch in range(self.branches):
            groups = defaultdict[int, dict[int, EmbeddedPrefix]](dict)
            for slot in sorted(prompts):  # in the order of the cache's rows
                prefix = prompts[slot].embed(branch, self.decoder)
                groups[slot if branch else prefix.rows.shape[1]][slot] = prefix
            for group in groups.values():
                for slot, hidden in zip(group, self._begin(branch, group), strict=True):
                    features[slot].append(hidden)
        for slot, prompt in prompts.items():
            self._prompts[slot] = prompt.length
        logits = {slot: [self.logits(x[-1]) for x in of_slot] for slot, of_slot in features.items()}
        return {slot: Prefix(torch.stack(logits[slot]), features[slot]) for slot in prompts}

    def _begin(self, branch: int, prefixes: Mapping[int, EmbeddedPrefix]) -> Tensor:
        """Commits prefixes of T rows to P slots of a branch, one slot in the unconditional branch. Returns
        their features [P, T, D]."""
        caches = {row: self.cache.row(row) for row in (branch * self.slots + slot for slot in prefixes)}
        for cache in caches.values():
            cache.clear()
        first, one = next(iter(prefixes.values())), next(iter(caches.values()))
        count = first.rows.shape[1]
        entries = one.store[..., :count, :]
        if branch and self._unconditional and first.equals(self._unconditional[0]):
            _, known, hidden = self._unconditional
            entries.copy_(known)
        else:
            order = torch.arange(count, device=self.device).expand(len(caches), -1)
            rows = torch.cat([prefix.rows for prefix in prefixes.values()])
            mask = torch.cat([prefix.mask for prefix in prefixes.values()])
            lengths = [0 if row in caches else None for row in range(self.branches * self.slots)]
            meta = replace(self.cache.metadata(order, mask, lengths), kernel=one.kernel)
            hidden = self.decoder(rows, self.cache, meta)
            if branch:
                self._unconditional = first, entries.clone(), hidden
        for cache, (slot, prefix) in zip(caches.values(), prefixes.items(), strict=True):
            cache.begin(count, prefix.padding)
            if not branch:
                self._cells.begin(slot, count - prefix.padding)
        return hidden

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        rows, cells = self.padding.nodes(tree.nodes), self.padding.committed(committed)
        return self.score(tree.codes, tree.depths, tree.ancestors, cells, rows)

    @property
    def prompts(self) -> Sequence[int]:
        """Bounds on the rows of the prompts in the slots."""
        return self.padding.prompts(self._prompts)

    def score(
        self,
        codes: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        committed: tuple[int, ...],
        rows: int = 0,
    ) -> Scored:
        """Returns the logits and features of nodes with codes and depths [B, N] and ancestors [B, N, N]. A
        node at a row end is read as the row end's token, whatever its code.

        committed: bounds on the cells in the prefixes, one for each slot or one for all. rows: the number of
        rows of the pass, if greater than N; the added rows are not used. The result is zero for slots that
        the pass leaves out. A pass writes only entries after the committed prefix, so running it twice does
        what running it once does.
        """
        nodes = codes.shape[1]
        added = rows - nodes
        if added > 0:
            codes, depths = F.pad(codes, (0, added)), F.pad(depths, (0, added))
            ancestors = F.pad(ancestors, (0, added, 0, added))
            ancestors = ancestors | torch.eye(rows, dtype=torch.bool, device=self.device)
        tokens = self._cells.ids(codes, self.cache.length, depths)
        lengths = self._lengths(committed)
        present = None
        if None in lengths:
            numbers = [slot for slot, length in enumerate(lengths) if length is not None]
            present = to_device(numbers, self.device)
            tokens, depths, ancestors = tokens[present], depths[present], ancestors[present]
        features = self.features(tokens, depths, ancestors, lengths)[:, :, :nodes]
        logits = self.logits(features)
        if present is None:
            return Scored(logits, features)
        return Scored(*(self._in_slots(present, x) for x in (logits, features)))

    def _in_slots(self, present: Tensor, x: Tensor) -> Tensor:
        """Returns [G, B, ...] with x [G, P, ...] in the P slots `present`, and zeros in the others."""
        return x.new_zeros(self.branches, self.slots, *x.shape[2:]).index_copy_(1, present, x)

    def _lengths(self, committed: tuple[int, ...]) -> list[int | None]:
        """Returns the bounds on the rows of prefixes that KVCache.metadata() takes. If the cache may skip
        rows, passes leave out idle slots."""
        skip = self.cache.may_skip_rows
        pairs = zip(committed, self.prompts, strict=False)
        return [None if skip and not prompt else cells + prompt for cells, prompt in pairs]

    def features(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, lengths: Sequence[int | None]
    ) -> Tensor:
        """Returns the features [G, P, N, D] of nodes with tokens and depths [P, N] and ancestors [P, N, N].

        lengths: a bound on the rows of each slot's prefix, prompt included, as KVCache.metadata() takes them.
        P counts the slots whose bound is not None; the pass leaves out the others.
        """
        x = by_branch(self.decoder.embed(tokens), self.branches)
        depths, ancestors = (by_branch(t, self.branches) for t in (depths, ancestors))
        meta = self.cache.metadata(depths, ancestors, lengths)
        return self.decoder(x, self.cache, meta, self.join).unflatten(0, (self.branches, len(tokens)))

    def logits(self, features: Tensor) -> Tensor:
        """Returns the logits of the codes, [..., V] fp32, of features [..., D]."""
        return logits_of(self.decoder.head, features)

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        path, count = (by_branch(x, self.branches) for x in (verdict.path, verdict.count))
        self.cache.commit(path, count, tree.leafy_chain)

    def move(self, source: Tensor, place: Tensor) -> None:
        """Copies entries of the cache in all branches, for passes whose cells are not committed in raster
        order: entry source [B, E] after the prefix to entry place [B, E] after it."""
        self.cache.move(*(by_branch(x, self.branches) for x in (source, place)))

    def release(self, slot: int) -> None:
        self._prompts[slot] = 0
        self.cache.erase(slice(slot, None, self.slots))
