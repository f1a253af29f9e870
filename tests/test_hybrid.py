"""The hybrid: the drafter has a say where the cache is stale, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.decode import finished, speculative
from adt_tree.policy import Fixed
from adt_tree.proposers.candidates import Candidates
from adt_tree.proposers.eagle import EagleProposer, grow_dynamic
from adt_tree.proposers.hybrid import LEAST_LOG_Q, HybridProposer, joint
from adt_tree.records import Decoded
from adt_tree.roles import Prefix, Proposer
from adt_tree.sampling import Sampling
from tests.decoding import CPU, tree_of
from tests.test_engine import (
    CANDIDATES,
    CODES,
    GRID,
    IMAGES,
    SAMPLINGS,
    SHAPES,
    Method,
    baseline,
    coupled,
    make_target,
)
from tests.test_self_draft import NOTHING, favour, lone_siblings, self_drafter, verdict

NAMES, EMPTY = ("sampled", "greedy"), Prefix(NOTHING, [])
MANY = [replace(IMAGES[n % len(IMAGES)], name=str(n), seed=n) for n in range(24)]


class Foreseeing:
    """A drafter that knows the images' codes, one image at a time, in their order; or is `off` by so many."""

    device = CPU

    def __init__(self, images: list[list[int]], off: int, branches: int) -> None:
        self._images, self._off, self._branches = iter(images), off, branches
        self._codes: list[int] = []
        self._next = 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """As roles.Drafter."""
        self._codes, self._next = next(self._images), 0

    def release(self, slot: int) -> None:
        """As roles.Drafter."""

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """As roles.Drafter."""
        self._next += int(count[0])
        logits = torch.zeros(self._branches, 1, CODES)
        logits[..., (self._codes[min(self._next, GRID.size - 1)] + self._off) % CODES] = 9.0
        return logits, features[:, :, -1]


def played(name: str, off: int) -> list[Decoded]:
    """The images under a hybrid with such a drafter: the AR baseline's."""
    sampling = SAMPLINGS[name]
    known = [image.codes for image in baseline(sampling, 1, MANY).values()]
    drafter = Foreseeing(known, off, sampling.branches)
    eagle = EagleProposer(drafter, sampling, grow_dynamic, 1)
    images = drafted(HybridProposer(self_drafter(GRID, CANDIDATES), eagle), sampling)
    assert [image.codes for image in images] == known
    return images


def alone(name: str) -> list[Decoded]:
    """The images self-drafted without a network."""
    return drafted(self_drafter(GRID, CANDIDATES), SAMPLINGS[name])


def drafted(proposer: Proposer, sampling: Sampling) -> list[Decoded]:
    """The images by a proposer, one at a time."""
    rule, policy = coupled(sampling), Fixed(SHAPES["tree"])
    target = make_target(1, sampling.branches)
    return list(finished(speculative(target, proposer, policy, rule, MANY, sampling)))


def count(images: list[Decoded]) -> int:
    """Target calls."""
    return sum(len(image.steps) for image in images)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_is_right_saves_calls_and_one_that_is_wrong_costs_some(name: str) -> None:
    right, wrong, without = count(played(name, off=0)), count(played(name, off=1)), count(alone(name))
    assert right < 0.9 * without < wrong


def test_stale_is_what_was_scored_below_another_code_alone() -> None:
    """Position 2 was scored below codes 1 and 7, which were drafted at 1; the target chose 4, then 1."""
    cache = self_drafter(GRID)
    cache.prefill(0, None, EMPTY, torch.tensor(1))
    assert not cache.stale(), "nothing was scored yet"
    cache.observe(lone_siblings(), favour([4, 2, 5, 5, 5]), NOTHING, verdict([0], [4]))
    assert cache.candidates(1, 2).codes[0, 0, 0] == 2 and cache.stale()
    cache.prefill(0, None, EMPTY, torch.tensor(1))
    cache.observe(lone_siblings(), favour([1, 2, 5, 5, 5]), NOTHING, verdict([0], [1]))
    assert cache.candidates(1, 2).codes[0, 0, 0] == 2 and not cache.stale()


def test_what_is_below_the_code_believed_first_is_looked_up_below_it() -> None:
    """Position 3 was read below code 5 at position 2 as 6, below code 2 as 8; 2 is the cache's own best."""
    cache = self_drafter(GRID)
    cache.prefill(0, None, EMPTY, torch.tensor(3))
    tree = tree_of(torch.tensor([[3, 1, 2, 5]]), torch.tensor([[0, 0, 1, 1]]))
    cache.observe(tree, favour([1, 2, 8, 6]), NOTHING, verdict([0], [1]))
    best = [cache.candidates(2, 2, first).codes[0, :, 0].tolist() for first in (None, torch.tensor([5]))]
    assert best == [[2, 8], [2, 6]]


def test_a_product_where_the_cache_is_stale_and_the_cache_elsewhere() -> None:
    """Codes 0, 1 of three places are cached; the drafter likes 2, then 1."""
    log = torch.tensor([0.6, 0.3]).log()
    cached = Candidates(torch.tensor([[[0, 1, 7]]] * 2), torch.tensor([[[*log, float("-inf")]]] * 2))
    log_q = torch.full((2, CODES), -20.0)
    log_q[:, 1], log_q[:, 2] = torch.tensor([0.3, 0.7]).log()
    found = joint(cached, log_q, log_q, torch.tensor([True, False]))
    weights = {2: 0.3 * 0.7, 1: 0.3 * 0.3}  # code 2 is not named: it has the share of the last one that is
    assert found.codes[0, 0, :2].tolist() == list(weights)
    ratio = found.confidence[0, 0, 0] - found.confidence[0, 0, 1]
    assert float(ratio.exp()) == pytest.approx(weights[2] / weights[1])
    assert len(set(found.codes[0, 0].tolist())) == 3
    assert float(found.confidence[0, 0, 2] - found.confidence[0, 0, 1]) < LEAST_LOG_Q / 2
    assert torch.equal(found.codes[1], cached.codes[1])
    assert torch.equal(found.confidence[1], cached.confidence[1])


@pytest.mark.parametrize("name", ["sampled", "greedy", "filtered"])
def test_no_two_children_of_a_node_share_a_code(name: str) -> None:
    """Two would both be hits of the coupled rule, and the walk takes at most one child per node."""
    target, sampling = make_target(2, SAMPLINGS[name].branches), SAMPLINGS[name]
    steps = Method("longer than a row", coupled(sampling), "hybrid").steps(target, sampling)
    seen = [step.tree for step in steps]
    assert len(seen) > 10 and max(tree.nodes for tree in seen) > 12
    for grown in seen:
        for image in range(2):
            nodes = grown.valid[image].nonzero().flatten().tolist()[1:]
            named = [(int(grown.parents[image, n]), int(grown.codes[image, n])) for n in nodes]
            assert len(set(named)) == len(named)
            assert all(int(grown.parents[image, n]) < n for n in nodes)
            above = grown.depths[image][grown.parents[image, nodes]]
            assert torch.equal(above + 1, grown.depths[image, nodes])
