"""What is counted of the steps of a tree, and what it promises other trees."""

from __future__ import annotations

from itertools import pairwise

import pytest

from adt_tree.budget.acceptance import REFINEMENT, Levels
from adt_tree.budget.policy import WARM_UP, CostAware
from adt_tree.policy import PLAIN, TreeShape
from tests.test_budget import CANDIDATES, POSITIONS, step


def test_deeper_self_drafted_trees_promise_more_of_every_level() -> None:
    """Two trees have 7 levels, and the second has twice as many nodes. The steps of either promise the second
    one more, but not with a drafter network, whose drafts do not depend on the trees before them."""
    for self_drafts in (True, False):
        for measured in (1, 2):
            shapes = [PLAIN, TreeShape(7, 1, 7), TreeShape(7, 2, 15)]
            policy = CostAware(shapes, POSITIONS, self_drafted=self_drafts)
            policy.shapes({0: 0})
            policy._current, policy._settled = policy._candidates[measured], WARM_UP
            for _ in range(3000):
                policy.observe({0: step(policy._current.shape, 3, 1.0)})
            policy._schedule()
            promised = policy._promised
            assert promised[2] == pytest.approx(promised[1] * (2**REFINEMENT if self_drafts else 1.0))
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


def test_a_tree_is_hoped_for_until_steps_of_its_depth_tell() -> None:
    """A chain of 7 is expected to accept 4 codes. It is hoped to accept a fifth more after no step, and also
    after steps of a chain of 3, but only a tenth more after 75 steps of a chain of 15."""
    policy = CostAware(CANDIDATES, POSITIONS)
    policy.shapes({0: 0})
    chain = next(c for c in policy._candidates if c.shape == TreeShape(7, 1, 7))
    policy._promised[chain.index] = 4.0
    for depth, hoped in ((3, 4.8), (15, 4.4)):
        for _ in range(75):
            policy._levels.count(depth, 3, 1.0)
        assert policy._hoped_codes(chain) == pytest.approx(1 + hoped, abs=0.01)


def test_trees_of_a_network_are_not_hoped_for() -> None:
    """Each time it is taken up, it reads what was decoded plainly, which no timed step shows."""
    policy = CostAware([PLAIN, TreeShape(2, 3, 6)], POSITIONS, self_drafted=False)
    policy.shapes({0: 0})
    tree = policy._candidates[1]
    assert policy._hoped_codes(tree) == 1 + policy._accepts(tree)


def test_a_step_whose_images_have_failed_is_not_counted() -> None:
    """One of two images fails in step 50, and both fail in step 60. Others take their places each time."""
    policy, left = CostAware(CANDIDATES, POSITIONS), {50: [0], 60: []}
    for number in range(400):
        shapes = policy.shapes({0: number % 200, 1: number % 200})
        policy.observe(
            {slot: step(shapes[slot], shapes[slot].depth, 1.0) for slot in left.get(number, [0, 1])}
        )
    assert policy.shapes({0: 201, 1: 201})[0].depth >= 15


def test_a_run_without_any_time_decodes_plainly() -> None:
    """The number of images changes at every step, so none is timed."""
    policy = CostAware(CANDIDATES, POSITIONS)
    for number in range(200):
        shapes = policy.shapes(dict.fromkeys(range(1 + number % 2), 1))
        policy.observe({slot: step(shape, 0, 1.0) for slot, shape in shapes.items()})
    assert shapes[0] == PLAIN
