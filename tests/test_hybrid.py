"""The drafter's weight in the hybrid: none before it has bettered the cache, and then to its gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.candidates import CandidateCache
from adt_tree.decode import speculative, speculative_steps
from adt_tree.hybrid import MARGIN, WEIGHTS, DrafterWeight, HybridProposer
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.records import Decoded
from adt_tree.roles import Prefix, Proposer
from adt_tree.sampling import Sampling
from adt_tree.verify import Coupled
from tests.decoding import CPU
from tests.test_engine import CODES, GRID, IMAGES, SAMPLINGS, baseline, make_target
from tests.test_self_draft import SHAPES, favour, hybrid, lone_siblings, self_drafter, verdict

NAMES, CANDIDATES = ("sampled", "greedy"), 5
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


def played(name: str, off: int) -> tuple[list[Decoded], float]:
    """The images under a hybrid with such a drafter, and the weight it ended with."""
    sampling = SAMPLINGS[name]
    known = [image.codes for image in baseline(sampling, 1, MANY).values()]
    drafter = Foreseeing(known, off, sampling.branches)
    cache = CandidateCache(GRID, 1, CANDIDATES, "above", CODES, CPU)
    proposer = HybridProposer(drafter, sampling, cache, 1)
    images = drafted(proposer, sampling)
    assert [image.codes for image in images] == known
    return images, float(proposer.weight.value)


def alone(name: str) -> list[Decoded]:
    """The images self-drafted without a network."""
    return drafted(self_drafter(GRID, 1, CANDIDATES, "above"), SAMPLINGS[name])


def drafted(proposer: Proposer, sampling: Sampling) -> list[Decoded]:
    """The images by a proposer, one at a time."""
    rule, policy = Coupled(Noise(CODES, silent=sampling.greedy)), Fixed(SHAPES["tree"])
    return list(speculative(make_target(1, sampling.branches), proposer, policy, rule, MANY, sampling))


def steps(images: list[Decoded]) -> list[object]:
    """What steps were, but for their clocks."""
    return [replace(step, ms=0.0) for image in images for step in image.steps]


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_is_wrong_changes_no_draft(name: str) -> None:
    images, weight = played(name, off=1)
    assert weight == 0
    assert steps(images) == steps(alone(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_is_right_comes_to_be_believed(name: str) -> None:
    images, weight = played(name, off=0)
    assert weight > 0
    assert sum(len(image.steps) for image in images) < 0.9 * sum(len(image.steps) for image in alone(name))


def test_a_weight_wants_more_than_luck() -> None:
    """Trees of four images; the last has no draft, and does not count."""
    weight, choice = DrafterWeight(CPU), torch.tensor([5, 5, 6, 5])
    guesses = torch.tensor([[4, 5, 4, 4, 4]]).expand(4, -1)  # the second weight's is right where code 5 comes
    drafted, turns = torch.tensor([[True]] * 3 + [[False]]), 0
    while not weight.value:
        weight.observe(guesses, drafted, choice)
        turns += 1
        assert weight.wins.tolist() == [0.0, 2.0 * turns, 0.0, 0.0, 0.0] and not weight.losses.any()
    assert 2 * turns > MARGIN**2 >= 2 * (turns - 1)  # n wins of n lie n beyond none, of spread sqrt(n)
    assert float(weight.value) == pytest.approx(WEIGHTS[1])
    for _ in range(turns):  # the cache alone is right where the second weight is not
        weight.observe(9 - guesses, drafted, choice)
    assert weight.losses[1] == weight.wins[1] and float(weight.value) == 0


def test_what_counts_is_the_targets_choice_whatever_a_relaxed_rule_took() -> None:
    """The target chose code 4 after the root, and child 1 was taken in its place."""
    cache = CandidateCache(GRID, 1, 2, "above", CODES, CPU)
    proposer = HybridProposer(Foreseeing([[]], 0, 1), SAMPLINGS["sampled"], cache, 1)
    proposer.prefill(0, None, Prefix(torch.zeros(1, CODES), [torch.zeros(1, 3)]), torch.tensor(1))
    proposer._guesses = torch.tensor([[1, 4, 4, 4, 4]])
    log_p = favour([4, 2, 4, 5, 8])
    proposer.observe(lone_siblings(), log_p, torch.zeros(1, 1, 5, 3), verdict([0, 1], [1, 2]))
    assert proposer.weight.wins.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0] and not proposer.weight.losses.any()


@pytest.mark.parametrize("name", ["sampled", "greedy", "filtered"])
def test_no_two_children_of_a_node_share_a_code(name: str) -> None:
    """Two would both be hits of the coupled rule, and the walk takes at most one child per node."""
    target, sampling = make_target(2, SAMPLINGS[name].branches), SAMPLINGS[name]
    policy, rule = Fixed(TreeShape(6, 4, 30)), Coupled(Noise(CODES, silent=sampling.greedy))
    steps = speculative_steps(target, hybrid(target, sampling, 2, 4), policy, rule, IMAGES, sampling)
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
