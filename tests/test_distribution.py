"""The distribution of whole images through the real loop, against the enumerated one: every rule, policy and
drafter, of which self-drafting and the hybrid draft from the very noise that tests their drafts.

A test passes at |z| < 4 with fixed seeds; every rule has a broken twin that must fail the same test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.grid import Grid
from adt_tree.noise import DRAFT, Noise, NoiseTable, uniform
from adt_tree.policy import AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.proposers.eagle import EagleProposer, Growth, grow_dynamic
from adt_tree.proposers.hybrid import HybridProposer
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.records import Decoded
from adt_tree.roles import Proposer
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Rejection, Rule, Verdict, verdict_from_hits
from tests.decoding import codes_of, static_growth
from tests.tabular import (
    CODES,
    CPU,
    TabularDrafter,
    TabularTarget,
    deviation,
    image_distribution,
    requests,
    table,
)

LENGTH, IMAGES, SLOTS, LIMIT = 4, 4096, 256, 4.0
WIDEST = 3  # candidates of a position that are kept
GRIDS = {"row": Grid(1, 4), "square": Grid(2, 2)}
FIXED = TreeShape(3, 2, 6)
DYNAMIC = ("fixed", "horizontal", "vertical", "random")
# A small model has short images: narrow bounds let every branch of the policy act within them.
STATIC = ("mc_sim_7b_63", "chain")  # the other list is wider than four codes
CONSTANTS = {"depth_max": 3, "depth_start": 2, "width_max": 3, "width_start": 2, "budget": 8}


@dataclass(frozen=True)
class Setup:
    """One way to decode images of the tables."""

    tree: str = "fixed"
    sampling: Sampling = field(default_factory=lambda: Sampling(guidance=1.5))
    grid: str = "row"
    slots: int = SLOTS
    drafter: str = "network"  # or self-draft, hybrid

    def policy(self) -> Policy:
        """fixed, an initialisation of the adaptive tree, or a static tree's shape."""
        if self.tree == "fixed":
            return Fixed(FIXED)
        if self.tree in STATIC_TREES:
            return Fixed(static_growth(self.tree)[1])
        return AdjacencyAdaptive(AdaptiveTree(init=self.tree, **CONSTANTS), self.slots)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Logits of target and drafter, quite unlike one another."""
        branches = self.sampling.branches
        return table(1, LENGTH, branches=branches), table(2, LENGTH, branches=branches)

    def target(self) -> TabularTarget:
        """The tabular target."""
        return TabularTarget(self.tables()[0], GRIDS[self.grid], self.slots)

    def deviation(self, images: Iterator[Decoded]) -> float:
        """How far images are from the distribution they must follow, in standard scores."""
        return abs(deviation(images, image_distribution(self.tables()[0], self.sampling, LENGTH)))

    def proposer(self, rule: Rule, scale: float) -> Proposer:
        """A fresh one; the logits of its tabular drafter are scaled."""
        own = SelfDraftProposer(GRIDS[self.grid], self.slots, WIDEST, "above", CODES, CPU)
        if self.drafter == "self-draft":
            return own
        growth: Growth = grow_dynamic
        if self.tree in STATIC_TREES:
            growth, _ = static_growth(self.tree, keep_q=isinstance(rule, Rejection))
        drafter = TabularDrafter(scale * self.tables()[1])
        eagle = EagleProposer(drafter, self.sampling, growth, self.slots)
        return eagle if self.drafter == "network" else HybridProposer(own, eagle)

    def speculate(self, rule: Rule, images: int = IMAGES, scale: float = 1.0) -> Iterator[Decoded]:
        """Images of the speculative loop."""
        given = (self.policy(), rule, requests(images), self.sampling)
        return finished(speculative(self.target(), self.proposer(rule, scale), *given))

    def baseline(self, images: int) -> Iterator[Decoded]:
        """The AR baseline's images."""
        noise = Noise(CODES, silent=self.sampling.greedy)
        return finished(autoregressive(self.target(), requests(images), self.sampling, noise))


UNGUIDED = Sampling(guidance=1.0)
FILTERED = Sampling(temperature=0.8, top_k=3, top_p=0.9, guidance=1.5)
COOL = Sampling(temperature=0.5, guidance=2.0)
NOISE = Noise(CODES, silent=False)


@cache
def baseline_codes(sampling: Sampling, images: int) -> dict[str, list[int]]:
    """The AR baseline's images by name."""
    return codes_of(Setup(sampling=sampling).baseline(images))


@pytest.mark.parametrize("sampling", [Sampling(guidance=1.5), UNGUIDED, FILTERED])
def test_ar_baseline(sampling: Sampling) -> None:
    setup = Setup(sampling=sampling)
    assert setup.deviation(setup.baseline(IMAGES)) < LIMIT


COUPLED_SETUPS = [Setup(tree, grid=grid) for tree in DYNAMIC for grid in GRIDS]
COUPLED_SETUPS += [Setup(tree) for tree in STATIC]
COUPLED_SETUPS += [Setup("horizontal", sampling) for sampling in (UNGUIDED, FILTERED, COOL)]
COUPLED_SETUPS += [Setup("vertical", slots=1), Setup("mc_sim_7b_63", FILTERED, slots=7)]
OWN = list(product(("self-draft", "hybrid"), ("fixed", "horizontal")))
COUPLED_SETUPS += [
    Setup(tree, sampling, drafter=drafter)
    for drafter, tree in OWN
    for sampling in (Sampling(guidance=1.5), UNGUIDED, FILTERED, COOL)
]


@pytest.mark.parametrize("setup", COUPLED_SETUPS, ids=str)
def test_coupled_is_the_ar_baseline(setup: Setup) -> None:
    """Token for token, so its distribution as well; and drafts are taken."""
    count = 64 if setup.slots < SLOTS else 512
    images = list(setup.speculate(Coupled(NOISE), count))
    assert codes_of(images) == baseline_codes(setup.sampling, count)
    share = 0.9 if setup.drafter == "network" else 0.95
    assert sum(image.target_calls for image in images) < share * (LENGTH - 1) * count


DISTRIBUTIONS = [Setup(tree, grid="square") for tree in (*DYNAMIC, "mc_sim_7b_63")]
DISTRIBUTIONS += [Setup(tree, grid=grid, drafter=drafter) for drafter, tree in OWN for grid in GRIDS]


@pytest.mark.parametrize("setup", DISTRIBUTIONS, ids=str)
def test_coupled(setup: Setup) -> None:
    assert setup.deviation(setup.speculate(Coupled(NOISE))) < LIMIT


REJECTION_SETUPS = [Setup(tree) for tree in (*DYNAMIC, *STATIC)]
REJECTION_SETUPS += [
    Setup(tree, sampling) for tree in ("fixed", "mc_sim_7b_63") for sampling in (UNGUIDED, FILTERED, COOL)
]


@pytest.mark.parametrize("setup", REJECTION_SETUPS, ids=str)
def test_rejection(setup: Setup) -> None:
    assert setup.deviation(setup.speculate(Rejection(CODES, setup.tree in STATIC_TREES))) < LIMIT


@pytest.mark.parametrize("scale", [30, 300])
def test_rejection_where_the_draft_underflows(scale: float) -> None:
    """A drafter so sure that fp32 hardly holds mass for its second choice, or none."""
    setup = Setup("mc_sim_7b_63")
    assert setup.deviation(setup.speculate(Rejection(CODES, static=True), scale=scale)) < LIMIT


class NeighbourNoise(Noise):
    """Broken: two positions share their noise."""

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Noise of the wrong position at odd ones."""
        return super().gumbel(seeds, positions - positions % 2)


class KeepsRejected(Rejection):
    """Broken: a rejected code stays in the residual."""

    def _take(self, p: Tensor, q: Tensor | None, code: Tensor, merged: Tensor) -> Tensor:
        return p


class KeepsDraft(Rejection):
    """Broken: the distribution of the next draw still holds the drawn code."""

    def _exclude(self, q: Tensor, code: Tensor) -> Tensor:
        return q


class ReusesDraftNoise(Rejection):
    """Broken: a code is judged by the very uniform it was drawn with."""

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Judge by the uniforms that the drafts were drawn with."""
        below = positions[:, None] + (tree.depths - 1).clamp_min(0)
        chances = uniform(seeds, below, CODES, DRAFT).gather(2, tree.codes[..., None])[..., 0].float()
        hit, residual = self.judge(tree, log_p.exp(), chances)
        noise = self._residual_noise.gumbel(seeds, positions[:, None])
        return verdict_from_hits(tree, hit, (residual.log() + noise).argmax(dim=-1))


class ReusesResidualNoise(Rejection):
    """Broken: the first code and the bonus codes come from one vector of noise."""

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The noise of position 1, which the first step uses again."""
        return super().choose(log_p, seeds, positions + 1)


class FormerNoise(Noise):
    """Broken: a position has the noise of the one before it, which the first position has too."""

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Noise of i - 1 at i > 0."""
        return super().gumbel(seeds, (positions - 1).clamp_min(0))


class OneNoise(Noise):
    """Broken: all positions share their noise."""

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Noise of position 0."""
        return super().gumbel(seeds, torch.zeros_like(positions))


class CycleNoise(Noise):
    """Broken: noise is counted from the first position of a step, so every step has that of the last."""

    def table(self, slots: int, positions: int, device: torch.device) -> NoiseTable:
        """Noise of the depth below the root."""
        return CycleTable(self, slots, positions, device)


class CycleTable(NoiseTable):
    """A NoiseTable of CycleNoise."""

    def at(self, positions: Tensor) -> Tensor:
        """Noise of the depth below the root."""
        return super().at(positions - positions[:, :1])


BROKEN = [(NeighbourNoise, Setup(tree)) for tree in (*DYNAMIC, *STATIC)]
BROKEN += [
    (kind, Setup(tree, drafter=drafter))
    for drafter, tree in OWN
    for kind in (FormerNoise, OneNoise, CycleNoise)
]


@pytest.mark.parametrize(("broken", "setup"), BROKEN, ids=str)
def test_control_coupled(broken: type[Noise], setup: Setup) -> None:
    rule = Coupled(broken(CODES, silent=False))
    assert setup.deviation(setup.speculate(rule, 2560)) > LIMIT


CONTROLS = [(KeepsRejected, tree) for tree in (*DYNAMIC, *STATIC)]
CONTROLS += [(KeepsDraft, "mc_sim_7b_63")]
CONTROLS += [(ReusesDraftNoise, tree) for tree in STATIC]
CONTROLS += [(ReusesResidualNoise, "fixed"), (ReusesResidualNoise, "chain")]


@pytest.mark.parametrize(("kind", "tree"), CONTROLS)
def test_control_rejection(kind: type[Rejection], tree: str) -> None:
    setup = Setup(tree)
    assert setup.deviation(setup.speculate(kind(CODES, tree in STATIC_TREES), 2560)) > LIMIT


def test_control_other_distribution() -> None:
    """The test tells this distribution from that of another guidance."""
    other = Setup(sampling=Sampling(guidance=1.7))
    assert other.deviation(Setup().speculate(Coupled(NOISE))) > LIMIT
