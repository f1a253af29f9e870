"""A target and a drafter whose distributions are tables over all prefixes, so that all images can be
enumerated.

A prefix is a state: 0 is the empty one, and state * V + 1 + code appends a code. Features are the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.lantern import nearest_table
from adt_tree.padding import Padding
from adt_tree.records import Decoded
from adt_tree.roles import Prefix, Request, Scored, run_directly
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from models.decoder.transformer import as_it_is

CODES = 4
CODEBOOK = torch.tensor([[0.0], [1.0], [2.1], [3.3]])


def table(seed: int, length: int) -> Tensor:
    """Returns random logits [2, S, V] for every prefix shorter than `length`."""
    states = sum(CODES**n for n in range(length))
    return 1.5 * torch.randn(2, states, CODES, generator=torch.Generator().manual_seed(seed))


def append(state: Tensor, codes: Tensor) -> Tensor:
    """Returns the state behind another code: state * V + 1 + code."""
    return state * CODES + 1 + codes


class TabularTarget:
    """A Target whose logits are a table [G, S, V], on its device."""

    num_codes, padding, run, compile = CODES, Padding(), staticmethod(run_directly), staticmethod(as_it_is)

    def __init__(self, logits: Tensor, grid: Grid, slots: int) -> None:
        self.logits, self.grid, self.slots, self.device = logits, grid, slots, logits.device
        self.committed = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._states = self.committed[:, None]

    def prefill(self, prompts: Mapping[int, Any]) -> dict[int, Prefix]:
        self.committed[[*prompts]] = 0
        features = [self.logits.new_zeros(1, 1)] * self.logits.shape[0]
        return dict.fromkeys(prompts, Prefix(self.logits[:, 0], features))

    def forward(self, tree: DraftTree, committed: Sequence[int | None]) -> Scored:
        state = append(self.committed[:, None], tree.codes)
        for depth in range(1, tree.depth + 1):
            below = append(state.gather(1, tree.parents), tree.codes)
            state = torch.where(tree.depths == depth, below, state)
        self._states = state
        features = state[None, ..., None].float().expand(self.logits.shape[0], -1, -1, -1)
        # In idle slots states lie beyond the image and wrap around.
        return Scored(self.logits[:, state % self.logits.shape[1]], features)

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        last = verdict.path.gather(1, (verdict.count - 1).clamp(min=0)[:, None])
        states = self._states.gather(1, last)[:, 0]
        self.committed = torch.where(verdict.count > 0, states, self.committed)

    def release(self, slot: int) -> None:
        self.committed[slot] = 0


class TabularDrafter:
    """A Drafter with another table over the same states."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.device = logits, logits.device

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None: ...

    def release(self, slot: int) -> None: ...

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        last = (count - 1).clamp(min=0)[:, None]  # a released slot has no pairs
        roots, features = codes.gather(1, last), features.gather(2, last[None, ..., None])
        logits, features_out = self.expand(roots, features, roots, None)
        return logits[:, :, 0], features_out[:, :, 0]

    def places(self, depths: Tensor, widths: Sequence[int]) -> list[None]:
        return [None] * len(widths)

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, place: None
    ) -> tuple[Tensor, Tensor]:
        # States beyond the image occur below leaves that are never accepted, so their logits do not matter.
        state = append(features[0, ..., 0].long(), codes)
        features_out = (state % 2**20)[None, ..., None].float()
        return self.logits[:, state % self.logits.shape[1]], features_out.expand(len(self.logits), -1, -1, -1)


@dataclass(frozen=True)
class TabularModel:
    """A Model (adt_tree.roles) of two tables [2, S, V]. Without guidance the first half of each is used."""

    logits: Tensor
    drafts: Tensor
    grid: Grid
    num_codes = CODES

    @property
    def codebook(self) -> Tensor:
        return CODEBOOK.to(self.logits.device)

    @property
    def embeddings(self) -> Tensor:
        return self.codebook

    def target(self, slots: int, sampling: Sampling, nodes: int, prompt: int) -> TabularTarget:
        return TabularTarget(self.logits[: sampling.branches], self.grid, slots)

    def drafter(self, target: TabularTarget, depth: int, width: int) -> TabularDrafter:
        return TabularDrafter(self.drafts[: len(target.logits)])

    def nearest(self, k: int, table: None) -> Tensor:
        return nearest_table(self.codebook, k)


def requests(count: int) -> list[Request]:
    """Returns requests that differ in their seeds alone."""
    return [Request(str(n), None, n) for n in range(count)]


def image_distribution(logits: Tensor, sampling: Sampling, length: int) -> Tensor:
    """Returns the exact distribution [V ** length] of an image's codes. The first code is the most
    significant digit."""
    p = log_probs(logits, PassSampling.uniform(sampling, logits.device)).double()
    if sampling.greedy:
        p = torch.full_like(p, float("-inf")).scatter(-1, p.argmax(-1, keepdim=True), 0.0)
    total, state = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        total = (total[:, None] + p[state]).flatten()
        state = append(state[:, None], torch.arange(CODES)).flatten()
    return total.exp()


def deviation(images: Iterator[Decoded], exact: Tensor) -> float:
    """Returns how far images are from the exact distribution: their chi-square statistic as a standard score.
    An image that the distribution excludes gives 1e9."""
    codes = torch.tensor([image.codes for image in images])
    place = (codes * CODES ** torch.arange(codes.shape[1]).flip(0)).sum(dim=1)
    counts = torch.bincount(place, minlength=len(exact)).double()
    if bool((counts[exact == 0] > 0).any()):
        return 1e9
    return chi_square(counts, exact * counts.sum())


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Returns the chi-square statistic of counts as a standard score. Outcomes that are expected fewer than
    five times are pooled into one. An outcome that cannot occur, but did, makes the score huge."""
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts.double(), expected))
    square = ((counts - expected) ** 2 / expected.clamp(min=1e-6)).sum()
    freedom = int(((expected > 1e-6) | (counts > 0)).sum()) - 1
    return float((square - freedom) / (2 * freedom) ** 0.5)
