"""A decoder with its cache, its code range and its prompts as the Target of adt_tree.

Dimensions: G guidance branches, B slots, R = G * B rows (branch-major: row g * B + b), N nodes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.roles import Prefix, Run, Scored, call
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from models.cache import KVCache
from models.graphs import context_bucket, row_bucket
from models.packed import cache_dtype, pack
from models.transformer import Decoder, join


@dataclass(frozen=True, slots=True)
class Lead:
    """One branch's prefix as the decoder takes it in, ending where the first code is predicted."""

    rows: Tensor  # [1, T, D] embedded
    seen: Tensor  # [1, T, T] bool: which rows each row attends to
    padding: int = 0  # leading rows that no later row attends to; the cache leaves them out


class EncodedPrompt(Protocol):
    """What an image begins with, in both guidance branches."""

    @property
    def length(self) -> int:
        """Rows of the longer prefix."""

    def lead(self, branch: int, decoder: Decoder) -> Lead:
        """The prefix of a branch, 0 the conditional one."""

    def tokens(self, branch: int) -> list[int]:
        """As many token ids as the branch has rows: a drafter embeds them beside the rows' features."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """An EncodedPrompt of token ids, each branch ending where the first code is predicted."""

    conditional: list[int]
    unconditional: list[int]

    @property
    def length(self) -> int:
        """Tokens of the longer prefix."""
        return max(len(self.conditional), len(self.unconditional))

    def lead(self, branch: int, decoder: Decoder) -> Lead:
        """The embedded prefix of a branch, every row of which sees all before it."""
        tokens = torch.tensor([self.tokens(branch)], device=decoder.embed.weight.device)
        return Lead(decoder.embed(tokens), chain_mask(tokens.shape[1], tokens.device))

    def tokens(self, branch: int) -> list[int]:
        """Token ids of a branch."""
        return self.unconditional if branch else self.conditional


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """A model's text side: what the user wrote -> what prefill takes; and where codes lie."""

    encode: Callable[[str], EncodedPrompt]  # the prefix of one image, to where its first code is predicted
    first_code: int  # token id of code 0
    num_codes: int  # size of the codebook
    num_classes: int = 0  # of a model that draws classes; 0: it draws texts
    release: Callable[[], None] = lambda: None  # gives back what only encoding needs


def by_branch(x: Tensor, branches: int) -> Tensor:
    """[B, ...] -> [G * B, ...]: both guidance branches see the same tree."""
    return x.repeat(branches, *([1] * (x.dim() - 1)))


def chain_mask(length: int, device: torch.device) -> Tensor:
    """[1, T, T] bool: a chain as a tree."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


class ARTarget:
    """The Target of a decoder. Every row has its own prefix length; the cache holds no padding.

    The decoder's head scores the codes alone (Decoder.cut_head). The cache holds max_prompt + grid.size +
    max_nodes slots a row and nothing else grows. On a CPU the decoder's layers and head are packed in place
    (models.packed): from then on it decodes and scores, and nothing else.
    """

    def __init__(
        self,
        decoder: Decoder,
        grid: Grid,
        codes: range,
        slots: int,
        branches: int,
        max_prompt: int,
        max_nodes: int,
        attend_in: torch.dtype | None = None,
        run: Run | None = None,
    ) -> None:
        """codes: token ids of the codebook. branches: 2 under guidance, else 1. max_nodes: of the largest
        tree, root included. attend_in: type of the cache and of attention; None: the fastest. run: what
        repeats the parts of a step; passes then have few shapes."""
        self.run, self.few_shapes = run or call, run is not None
        max_nodes = self.rows(max_nodes)
        weight = decoder.embed.weight
        self.decoder, self.grid, self.slots = decoder, grid, slots
        self.num_codes, self.first_code = len(codes), codes.start
        self.branches, self.max_prompt = branches, max_prompt
        self.join = join
        self.device = weight.device
        config = decoder.config
        capacity = max_prompt + grid.size + max_nodes
        # A checkpoint whose own image does not fit its max_position_embeddings was not made to keep to it.
        if capacity > config.max_positions >= grid.size:
            raise UserError(
                f"{max_prompt} prompt tokens, {grid.size} codes and a tree of {max_nodes} nodes need "
                f"{capacity} positions; the model has {config.max_positions}: shorten the prompt or the tree"
            )
        decoder.reserve(capacity)
        pack(decoder)
        rows, dtype = branches * slots, attend_in or cache_dtype(weight)
        padded = config.raster_side > 0  # positions of a raster count the padding before a prompt too
        self.cache = KVCache.allocate(config, rows, capacity, dtype, self.device, padded)

    def prefill(self, slot: int, prompt: EncodedPrompt) -> Prefix:
        """Forget the slot's image and commit the prompt, each branch in a pass of its own."""
        if prompt.length > self.max_prompt:
            raise ValueError(f"a prompt of {prompt.length} tokens; the cache was sized for {self.max_prompt}")
        features, logits = [], []
        for branch in range(self.branches):
            lead = prompt.lead(branch, self.decoder)
            count = lead.rows.shape[1]
            cache = self.cache.row(branch * self.slots + slot)
            cache.clear()
            order = torch.arange(count, device=self.device)[None]
            hidden = self.decoder(lead.rows, cache, cache.metadata(order, lead.seen, max_length=0))[0]
            cache.begin(count, lead.padding)
            features.append(hidden)
            logits.append(self.logits(hidden[-1]))
        return Prefix(torch.stack(logits), features)

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """Logits and features of every node; committed: image codes in each slot's prefix."""
        rows, bound = self.rows(tree.nodes), self.bound(max(committed))
        return self.run(self.score, tree.codes, tree.depths, tree.ancestors, bound, rows)

    def rows(self, nodes: int) -> int:
        """Returns the number of rows of a pass over so many nodes."""
        return row_bucket(nodes) if self.few_shapes else nodes

    def bound(self, most_committed: int) -> int:
        """Returns the bound on the committed codes of a slot that a pass takes."""
        return context_bucket(most_committed, self.grid.size) if self.few_shapes else most_committed

    def score(
        self, codes: Tensor, depths: Tensor, ancestors: Tensor, most_committed: int, rows: int = 0
    ) -> Scored:
        """Score nodes: codes and depths [B, N], ancestors [B, N, N]; at most most_committed codes a slot.

        rows: of the pass, if more than N: the others see themselves alone, and nobody reads them.
        """
        nodes = codes.shape[1]
        more = rows - nodes
        if more > 0:
            codes, depths = F.pad(codes, (0, more)), F.pad(depths, (0, more))
            ancestors = F.pad(ancestors, (0, more, 0, more))
            ancestors = ancestors | torch.eye(rows, dtype=torch.bool, device=self.device)
        features = self.features(codes, depths, ancestors, most_committed)[:, :, :nodes]
        return Scored(self.logits(features), features)

    def features(self, codes: Tensor, depths: Tensor, ancestors: Tensor, most_committed: int) -> Tensor:
        """Features [G, B, N, D] of what score() takes. A pass writes nothing but scratch behind the committed
        slots: running it twice is running it once."""
        x = by_branch(self.decoder.embed(codes + self.first_code), self.branches)
        depths, ancestors = (by_branch(t, self.branches) for t in (depths, ancestors))
        meta = self.cache.metadata(depths, ancestors, most_committed + self.max_prompt)
        return self.decoder(x, self.cache, meta, self.join).unflatten(0, (self.branches, self.slots))

    def logits(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., V] fp32, over the image codes."""
        return self.decoder.head(features).float()

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        """Append the accepted path of the tree just scored to each slot's prefix, in both branches."""
        self.run(self.commit_path, verdict.path, verdict.count, tree.leafy_chain)

    def commit_path(self, path: Tensor, count: Tensor, leafy_chain: bool = False) -> None:
        """Append nodes path [B, A] of the pass just run, `count` [B] of them valid."""
        path, count = (by_branch(x, self.branches) for x in (path, count))
        self.cache.commit(path, count, leafy_chain)

    def release(self, slot: int) -> None:
        """Forget an idle slot's prefix."""
        self.cache.clear(slice(slot, None, self.slots))
