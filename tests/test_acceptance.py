"""What is counted of the steps of a tree, and what it promises other trees."""

from __future__ import annotations

from itertools import pairwise

import pytest

from adt_tree.budget.acceptance import OPTIMISM, Levels
from adt_tree.budget.policy import CostAware
from adt_tree.policy import PLAIN, TreeShape
from tests.test_budget import CANDIDATES, step


def test_deeper_self_drafted_trees_promise_more_of_every_level() -> None:
    """Two trees have 7 levels, and the second has twice as many nodes. The steps of either promise the second
    one more, but not with a drafter network, whose drafts do not depend on the trees before them."""
    for self_drafts in (True, False):
        for measured in (1, 2):
            policy = CostAware([PLAIN, TreeShape(7, 1, 7), TreeShape(7, 2, 15)], self_drafted=self_drafts)
            policy.shapes({0: 0})
            policy._current = policy._candidates[measured]
            policy._count([step(policy._current.shape, 3, 1.0)] * 2000)
            promised = policy._promise()
            assert promised[2] == pytest.approx(promised[1] * (2**0.1 if self_drafts else 1.0))
            assert promised[measured] == pytest.approx(3, abs=0.1)


def test_deep_levels_do_not_suffer_from_the_images_of_deep_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the steps of trees of 3 levels reach level 3, and half of these accept a code of it.
    Half of the steps of trees of 2 levels, in other images, accept two codes. So 3/8 of all steps reach level
    3, and 3/16 should accept a code of it, not 1/8."""
    monkeypatch.setattr("adt_tree.budget.acceptance.LAW_STEPS", 0.0)
    levels = Levels(3)
    for _ in range(200):
        for accepted in ((3, 2), (2, 2), (0, 2), (0, 2), (0, 0), (0, 0), (0, 0), (0, 0)):
            for depth, number in zip((3, 2), accepted, strict=True):
                levels.count(depth, number, 1.0)
    shares = [after - before for before, after in pairwise(levels.accepted_codes())]
    assert shares == pytest.approx([3 / 8, 3 / 8, 3 / 16], rel=0.02)


def test_levels_that_are_little_measured_are_hoped_for() -> None:
    """Steps of a chain of 15 show what one of 7 accepts, but not the other way round."""
    for depth, hoped in ((7, [15]), (15, [])):
        levels = Levels(15)
        for _ in range(2000):
            levels.count(depth, 3, 1.0)
        assert [n for n in (7, 15) if levels.optimism(n) == pytest.approx(1 + OPTIMISM)] == hoped
        assert levels.optimism(7) < 1 + OPTIMISM / 4


def test_a_step_whose_images_have_failed_is_not_counted() -> None:
    """One of two images fails in step 50, and both fail in step 60. Others take their places each time."""
    policy, left = CostAware(CANDIDATES), {50: [0], 60: []}
    for number in range(400):
        shapes = policy.shapes({0: number % 200, 1: number % 200})
        policy.observe(
            {slot: step(shapes[slot], shapes[slot].depth, 1.0) for slot in left.get(number, [0, 1])}
        )
    assert policy.shapes({0: 201, 1: 201})[0].depth >= 15
