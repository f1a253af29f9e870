"""Batches in step: after a trial of trees the images of a batch that decodes plainly wait for one another."""

from __future__ import annotations

import pytest

from adt_tree.budget.policy import CostAware
from adt_tree.policy import PLAIN, TreeShape
from tests.test_budget import CANDIDATES, POSITIONS, step

Run = list[dict[int, TreeShape]]  # the shapes of each step, by slot


def run(policy: CostAware, roots: dict[int, int], steps: int, row_ms: float = 1.0) -> Run:
    """Returns the shapes of steps that take 1 ms, and row_ms more for every drafted node. The first image
    accepts all drafts, the others one."""
    used = []
    for _ in range(steps):
        shapes = dict(policy.shapes(roots))
        used.append(shapes)
        accepted = {slot: shape.depth if slot == 0 else min(1, shape.depth) for slot, shape in shapes.items()}
        ms = 1.0 + row_ms * next(iter(shapes.values())).budget
        policy.observe({slot: step(shapes[slot], number, ms) for slot, number in accepted.items()})
        for slot, number in accepted.items():
            roots[slot] += number + 1
    return used


def until_plain(policy: CostAware, roots: dict[int, int]) -> None:
    """Decodes until plain decoding has been chosen after trees, which put the images out of step."""
    for _ in range(1000):
        before = run(policy, roots, 1)[0]
        if before[0] == PLAIN and len({*roots.values()}) > 1 and policy._chosen is policy._candidates[0]:
            return
    pytest.fail("plain decoding was not chosen")


def test_images_ahead_wait_after_trees() -> None:
    """The last images alone decode until all are equally far. A step for all follows before others count."""
    policy, roots = CostAware(CANDIDATES, POSITIONS), dict.fromkeys(range(3), 0)
    until_plain(policy, roots)
    ahead = roots[0] - roots[1]
    assert ahead > 0 and roots[1] == roots[2]
    assert run(policy, roots, ahead) == [{1: PLAIN, 2: PLAIN}] * ahead
    assert len({*roots.values()}) == 1
    scheduled = len(policy._scheduled)
    assert run(policy, roots, 1) == [dict.fromkeys(range(3), PLAIN)] and len(policy._scheduled) == scheduled


def test_no_image_waits_where_idle_slots_cost() -> None:
    policy = CostAware(CANDIDATES, POSITIONS, idle_slots_cost=True)
    roots = dict.fromkeys(range(3), 0)
    until_plain(policy, roots)
    assert all(len(shapes) == 3 for shapes in run(policy, roots, 20))


def test_no_image_waits_for_a_new_one() -> None:
    """A client leaves after trees, and the next image takes the slot."""
    for new_image in (False, True):
        policy, roots = CostAware(CANDIDATES, POSITIONS), dict.fromkeys(range(3), 0)
        until_plain(policy, roots)
        if new_image:
            policy.reset(2, seed=1)
            roots[2] = 0
        assert len(policy.shapes(roots)) == (3 if new_image else 2)


def test_images_wait_again_once_a_batch_begins_anew() -> None:
    policy, roots = CostAware(CANDIDATES, POSITIONS), dict.fromkeys(range(3), 0)
    until_plain(policy, roots)
    for slot in roots:
        policy.reset(slot, seed=1)
        roots[slot] = 0
    run(policy, roots, 1)
    roots[0] += 5
    assert set(run(policy, roots, 5)[0]) == {1, 2}


def test_what_images_lose_by_waiting_counts_as_loss_of_trials() -> None:
    """One of three images takes no part in each step, so a third of its time counts, but only if they wait
    because of a trial. The first ones wait because plain decoding was chosen after first trials. All of this
    is in the first half of very large images."""
    policy, roots = CostAware(CANDIDATES, 80000), dict.fromkeys(range(3), 16000)
    until_plain(policy, roots)
    lost_ms = policy._lost_ms
    assert all(len(shapes) == 2 for shapes in run(policy, roots, roots[0] - roots[1]))
    assert policy._lost_ms == lost_ms
    for _ in range(14000):
        lost_ms = policy._lost_ms
        if len(run(policy, roots, 1, row_ms=0.8)[0]) == 2:
            assert policy._lost_ms - lost_ms == pytest.approx(1 / 3)
            return
    pytest.fail("no trial put the batch out of step")


def test_a_step_for_all_images_precedes_trees() -> None:
    """While an image waits, the policy is made to choose a tree. A drafter needs a step
    first in which all commit a code."""
    policy, roots = CostAware(CANDIDATES, POSITIONS), dict.fromkeys(range(3), 0)
    until_plain(policy, roots)
    assert set(run(policy, roots, 1)[0]) == {1, 2}
    policy._scheduled.clear()
    policy._scheduled.extend([policy._candidates[1]] * 2)
    first, second = run(policy, roots, 2)
    assert first == dict.fromkeys(range(3), PLAIN) and second[0] == CANDIDATES[1]


def test_a_batch_in_step_drafts_if_trees_are_better_over_the_whole_image() -> None:
    """Four images begin together whenever all have ended. A plain step takes 4 ms at their beginning, where
    trees are tried, and 12 ms at their end. A step of the chain of 3 commits three codes in 14 ms, so it is
    worse at first, and better later."""
    policy, used, root = CostAware(CANDIDATES, POSITIONS), list[TreeShape](), 0
    for _ in range(3000):
        if root == 0:
            for slot in range(4):
                policy.reset(slot, seed=1)
        shape = policy.shapes(dict.fromkeys(range(4), root))[0]
        used.append(shape)
        ms = 11.0 + shape.budget if shape.depth else 4 + 8 * root / POSITIONS
        accepted = min(2, shape.depth)
        policy.observe({slot: step(shape, accepted, ms, root + 1) for slot in range(4)})
        root = root + accepted + 1 if root + accepted < POSITIONS - 1 else 0
    assert used[-1000:].count(CANDIDATES[1]) > 800
