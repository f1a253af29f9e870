"""A run's dumps read back, and a target that plays them instead of computing.

Dimensions: G guidance branches, B images in flight, N nodes, L levels, T prompt tokens, n codes an image, E
laws ahead, K candidates, C cycles, I inner nodes of a static tree, V codes, D features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.passes import DIRECT
from adt_tree.roles import Prefix, Request, Scored
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from eval.errors import UserError
from eval.outputs import DUMP
from models.drafter import EagleDrafter
from models.model import Model
from models.packed import product
from models.target import Lead, Prompt
from models.transformer import Decoder

AS_RECORDED = Sampling(temperature=1.0, guidance=1.0)  # recorded laws are guided and filtered already


@dataclass(frozen=True, slots=True)
class Trees:
    """The static trees drafted along an image under rejection verification."""

    codes: Tensor  # [C, N] int64
    valid: Tensor  # [C, N] bool
    log_p: Tensor  # [C, I, V] fp32 at the inner nodes, in node order
    q: Tensor  # [C, I, V] fp32 what their children were drawn from
    accepted: Tensor  # [C] int64: draft codes the run accepted


@dataclass(frozen=True, slots=True)
class DumpedImage:
    """One image as its run left it; stands for the prompt in requests of a replay."""

    name: str
    seed: int
    number: int  # place among the prompts that all runs in the folder select from
    conditional: list[int]  # token ids of the prompt, which the drafter reads
    unconditional: list[int]
    codes: Tensor  # [n] int64
    log_p: Tensor  # [n, V] fp32, guided and filtered: the law of each code after those before it
    features: Tensor  # [G, n - 1, D] of every code but the last, which no pass has read
    prompt_features: Sequence[Tensor]  # [T_g, D] of every branch
    ahead_known: Tensor  # [E] int64: codes that were known after the cycle that read the law; in that order,
    # and of the laws that a cycle read of one position, that which says most of it last
    ahead_position: Tensor  # [E] int64
    ahead_above: Tensor  # [E] int64: the code it was read below
    ahead_codes: Tensor  # [E, K] int64
    ahead_confidence: Tensor  # [E, K] log softmax(log p + G) of these codes
    trees: Trees | None

    @property
    def length(self) -> int:
        """Tokens of the longer prefix."""
        return max(len(self.conditional), len(self.unconditional))

    def tokens(self, branch: int) -> list[int]:
        """See models.target.Opening."""
        return self.unconditional if branch else self.conditional

    def lead(self, branch: int, decoder: Decoder) -> Lead:
        """See models.target.Opening."""
        return Prompt(self.conditional, self.unconditional).lead(branch, decoder)


def read_dumps(run: Path, device: torch.device) -> list[DumpedImage]:
    """The dumped images of a run, in the order of its prompts. UserError if there are none, or one is
    damaged."""
    paths = sorted((run / DUMP).glob("*.safetensors"))
    if not paths:
        raise UserError(f"{run}: it holds no dump; run generate_images with --dump N on this folder")
    return sorted((_read(path, device) for path in paths), key=lambda dump: dump.number)


def requests(dumps: Sequence[DumpedImage]) -> Iterator[Request]:
    """The recorded images, to be played or, their prompts being in them, to be made again."""
    return (Request(dump.name, dump, dump.seed) for dump in dumps)


def _read(path: Path, device: torch.device) -> DumpedImage:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
            return _image(facts, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged ({reason}): delete it and run generate_images with --dump again"
        ) from None


def _image(facts: dict[str, Any], found: dict[str, Tensor]) -> DumpedImage:
    trees = None
    if "tree_codes" in found:
        names = ("codes", "valid", "log_p", "q", "accepted")
        trees = Trees(*(found[f"tree_{name}"] for name in names))
    branches = sum(name.startswith("prompt_features_") for name in found)
    return DumpedImage(
        name=facts["name"],
        seed=facts["seed"],
        number=facts["number"],
        conditional=found["conditional"].tolist(),
        unconditional=found["unconditional"].tolist(),
        codes=found["codes"],
        log_p=found["log_p"],
        features=found["features"],
        prompt_features=[found[f"prompt_features_{branch}"] for branch in range(branches)],
        ahead_known=found["ahead_known"],
        ahead_position=found["ahead_position"],
        ahead_above=found["ahead_above"].long(),
        ahead_codes=found["ahead_codes"].long(),
        ahead_confidence=found["ahead_confidence"],
        trees=trees,
    )


def newest(playing: DumpedImage, known: Tensor, at: Tensor, above: Tensor) -> Tensor:
    """[N]: the newest entry of positions at [N] that knew at most so many codes [], below the codes above [N]
    if there is one, else below any; -1: there is none."""
    number = torch.arange(len(playing.ahead_known), device=at.device)
    there = (playing.ahead_position == at[:, None]) & (playing.ahead_known <= known)
    same = there & (playing.ahead_above == above[:, None])
    rank = number.where(there, -1) + len(number) * same
    best = rank.amax(dim=1)
    return torch.where(best < 0, -1, best % len(number))


class RecordedTarget:
    """See adt_tree.roles.Target: plays DumpedImages, one a slot, without a pass.

    On the image's own path laws and features are the recorded ones, so whatever reads no others is replayed
    exactly: the coupled rule, and the drafter network. Off the path the law is unknown, and features are
    those of the path. What self-drafting keeps of it, the best codes of a position and their confidences, is
    taken from the newest recorded cycle that read the position below the node's code, or where none did below
    any, and had no more of the image's codes accepted than the replayed one: what the live run would see if
    the arm is the recorded one, else an approximation, for behind those codes the two arms' drafts differ.
    Codes beyond the candidates kept share the mass that is left; a position no such cycle scored has NaN
    laws, which self-drafting does not keep. Its laws are final: sample them as AS_RECORDED.
    """

    passes = DIRECT

    def __init__(self, model: Model, slots: int, sampling: Sampling, max_prompt: int) -> None:
        """sampling: the run's."""
        first, count = model.first_code, model.num_codes
        self.grid: Grid = model.grid
        self.slots, self.num_codes, self.first_code = slots, count, first
        self.branches, self.max_prompt = sampling.branches, max_prompt
        weight = model.decoder.head.weight[first : first + count]
        self.head, self.device = product(weight), weight.device
        self._noise = Noise(count, silent=sampling.greedy)
        self._playing: list[DumpedImage | None] = [None] * slots
        self._position = torch.ones(slots, dtype=torch.int64, device=self.device)

    def prefill(self, slot: int, prompt: DumpedImage) -> Prefix:
        """See Target."""
        self._playing[slot] = prompt
        self._position[slot] = 1
        return Prefix(prompt.log_p[None, 0], prompt.prompt_features)

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """See Target; logits [1, B, N, V] are log p."""
        on_path, last = self.on_path(tree), self.grid.size - 1
        laws, features = [], []
        for slot, playing in enumerate(self._playing):
            position = self._position[slot]
            at = (position + tree.depths[slot]).clamp(max=last)
            if playing is None:  # an idle slot's image is read by nobody
                playing = next(other for other in self._playing if other is not None)
            known = (position - 1 + on_path[slot].sum()).clamp(max=last)
            ahead = self._ahead(playing, known, at, tree.codes[slot])
            own = on_path[slot][:, None]
            laws.append(torch.where(own, playing.log_p[at], ahead))
            features.append(playing.features[:, at - 1])
        return Scored(torch.stack(laws)[None], torch.stack(features, dim=1))

    def on_path(self, tree: DraftTree) -> Tensor:
        """[B, N] bool: the nodes whose codes, and all above them, are the image's own."""
        right = (tree.codes == self.own_codes(tree.depths)) & tree.valid
        return ~(tree.ancestors & ~right[:, None]).any(dim=2)

    def own_codes(self, depths: Tensor) -> Tensor:
        """[B, N]: the image's own code at each depth [B, N] from the root (0) on; -1 in idle slots."""
        at = (self._position[:, None] + depths - 1).clamp(max=self.grid.size - 1)
        none = torch.full_like(at[0], -1)
        pairs = zip(self._playing, at, strict=True)
        return torch.stack([none if playing is None else playing.codes[row] for playing, row in pairs])

    def _ahead(self, playing: DumpedImage, known: Tensor, at: Tensor, above: Tensor) -> Tensor:
        """Laws [N, V] of the positions `at` [N] below the codes above [N], by the newest cycle that knew at
        most the first `known` codes."""
        entry = newest(playing, known, at, above)
        codes, confidence = playing.ahead_codes[entry], playing.ahead_confidence[entry]
        others = max(self.num_codes - codes.shape[1], 1)
        share = ((1 - confidence.exp().sum(dim=1)).clamp_min(0) / others).log()
        share = share.masked_fill(confidence[:, -1] == float("-inf"), float("-inf"))  # not even rounding
        law = share[:, None].repeat(1, self.num_codes).scatter(1, codes, confidence)
        seed = torch.tensor([playing.seed], device=self.device)
        law = law - self._noise.gumbel(seed, at[None])[0]  # the confidences have the noise in them
        return law.masked_fill((entry < 0)[:, None], float("nan"))

    def read_before(self, candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What SeenLaws.write takes of the laws that the recorded cycle before the current roots read, if one
        ended there: positions, codes above [B, E], best codes and their log-confidences [B, E, K], order."""
        rows = []
        for playing, position in zip(self._playing, self._position, strict=True):
            entry = torch.zeros(0, dtype=torch.int64, device=self.device)
            if playing is not None:
                entry = (playing.ahead_known == position - 1).nonzero()[:, 0]
            rows.append((playing, entry))
        most = max(len(entry) for _, entry in rows)
        at = torch.full((self.slots, most), self.grid.size, device=self.device)
        above, codes = torch.zeros_like(at), at.new_zeros(self.slots, most, candidates)
        confidence = torch.zeros(codes.shape, device=self.device)
        for slot, (playing, entry) in enumerate(rows):
            if playing is not None:
                here = slice(None, len(entry))
                at[slot, here] = playing.ahead_position[entry]
                above[slot, here] = playing.ahead_above[entry]
                codes[slot, here] = playing.ahead_codes[entry, :candidates]
                confidence[slot, here] = playing.ahead_confidence[entry, :candidates]
        return at, above, codes, confidence, torch.arange(most, 0, -1, device=self.device).expand_as(at)

    def commit(self, verdict: Verdict, scored: Scored) -> None:
        """See Target."""
        self._position += verdict.count

    def release(self, slot: int) -> None:
        """See Target."""
        self._playing[slot] = None
        self._position[slot] = 1


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """Stands for a model wherever an arm is built, but its targets play dumps."""

    model: Model

    @property
    def grid(self) -> Grid:
        """The model's."""
        return self.model.grid

    @property
    def num_codes(self) -> int:
        """The model's."""
        return self.model.num_codes

    @property
    def codebook(self) -> Tensor:
        """The model's."""
        return self.model.codebook

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> RecordedTarget:
        """As Model.target; trees of any size fit."""
        return RecordedTarget(self.model, slots, sampling, max_prompt)

    def drafter(self, target: RecordedTarget, max_depth: int, max_width: int) -> EagleDrafter:
        """As Model.drafter."""
        return self.model.drafter(target, max_depth, max_width)
