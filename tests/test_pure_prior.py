"""The spatial prior by hand: what is evidence, the rate around a cell, and the depth that pays."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from adt_tree.policy import AdaptConstants, Cell, TreeShape
from adt_tree.prior import LENGTH, STRENGTH, SpatialPrior, best_depth

CONSTANTS = AdaptConstants(depth_max=12, width_max=8, budget=24, policy="prior")


def prior(slots: int = 1, **changes: float) -> SpatialPrior:
    """A policy with every slot reset."""
    policy = SpatialPrior(replace(CONSTANTS, **changes), slots)
    for slot in range(slots):
        policy.reset(slot, seed=slot)
    return policy


def taught(cells: dict[Cell, bool]) -> SpatialPrior:
    """A policy that has seen one tree of one level at each cell."""
    policy = prior()
    for cell, accepted in cells.items():
        policy.observe(0, int(accepted), 1, [cell, (99, 99)] if accepted else [cell])
    return policy


def weight(squared: int) -> float:
    """Of a neighbour at a squared distance."""
    return exp(-squared / (2 * LENGTH**2))


@pytest.mark.parametrize(
    ("cost", "rate", "depth"),
    [
        (0.06, 0.0, 1), (0.06, 0.4, 2), (0.06, 0.6, 4), (0.06, 0.8, 7), (0.06, 0.9, 12),
        (0.01, 0.4, 4), (0.01, 0.6, 7), (0.01, 0.8, 14), (0.01, 0.9, 24),
        (0.06, 0.5, 3),  # 1.875 / 1.18 = 1.589; two or four levels: 1.5625
        (0.25, 1.0, 30), (2.0, 0.9, 1), (0.0, 0.5, 30),
    ],
)  # fmt: skip
def test_depth_by_cost(cost: float, rate: float, depth: int) -> None:
    assert best_depth(rate, cost, 1, 30) == depth


def test_the_least_depth_at_a_tie() -> None:
    assert best_depth(1.0, 1.0, 2, 9) == 2  # (1 + d) / (1 + d) everywhere


def test_depth_within_its_bounds() -> None:
    assert best_depth(0.0, 0.06, 3, 9) == 3
    assert best_depth(0.9, 0.01, 3, 9) == 9


def test_rate_of_a_small_history() -> None:
    """Two codes taken of four levels: ones at (0, 1) and (0, 2), a zero at (0, 3), which is the next root."""
    policy = prior()
    assert policy.rate(0, (0, 0)) == 0.5
    policy.observe(0, 2, 4, [(0, 1), (0, 2), (0, 3)])
    image = (1 + 2) / (2 + 3)
    near, far = weight(1), weight(4)
    expected = (STRENGTH * image + near + far) / (STRENGTH + near + far)
    assert policy.rate(0, (0, 3)) == pytest.approx(expected)
    below = weight(1 + 4) + weight(1 + 1) + weight(1)  # of (0, 1), (0, 2), (0, 3) from (1, 3)
    expected = (STRENGTH * image + below - weight(1)) / (STRENGTH + below)
    assert policy.rate(0, (1, 3)) == pytest.approx(expected)
    assert policy.rate(0, (9, 9)) == pytest.approx(image)  # nothing near


def test_shape_of_a_small_history() -> None:
    """0.693 by the sums above: five levels, 24 / 5 nodes each."""
    policy = prior()
    assert policy.shape(0, (0, 0)) == TreeShape(3, 8, 24)
    policy.observe(0, 2, 4, [(0, 1), (0, 2), (0, 3)])
    assert policy.rate(0, (0, 3)) == pytest.approx(0.693, abs=1e-3)
    assert policy.shape(0, (0, 3)) == TreeShape(5, 5, 24)


def test_the_code_after_an_accepted_tree_is_no_evidence() -> None:
    bonus, rejected, nothing = prior(), prior(), prior()
    bonus.observe(0, 2, 2, [(0, 1), (0, 2), (0, 3)])
    rejected.observe(0, 2, 3, [(0, 1), (0, 2), (0, 3)])
    nothing.observe(0, 0, 0, [(0, 1)])
    assert bonus.rate(0, (9, 9)) == 3 / 4
    assert rejected.rate(0, (9, 9)) == 3 / 5
    assert nothing.rate(0, (9, 9)) == nothing.rate(0, (0, 2)) == 1 / 2


@pytest.mark.parametrize("neighbour", [(3, 2), (2, 2), (2, 3), (2, 4), (0, 3), (3, 0), (0, 6)])
def test_neighbours_count(neighbour: Cell) -> None:
    """Left, above-left, above, above-right, and as far as three cells."""
    image_alike = {(40, 40): True, (50, 50): False}
    taken = taught({neighbour: True, (60, 60): False, **image_alike})
    refused = taught({neighbour: False, (60, 60): True, **image_alike})
    assert taken.rate(0, (3, 3)) > 0.5 > refused.rate(0, (3, 3))


@pytest.mark.parametrize("other", [(3, 3), (7, 3), (3, 7), (0, 7)])
def test_the_root_itself_and_far_cells_do_not(other: Cell) -> None:
    assert taught({other: True, (60, 60): False}).rate(0, (3, 3)) == 0.5


def test_nearer_cells_weigh_more() -> None:
    assert taught({(3, 2): True, (3, 1): False}).rate(0, (3, 3)) > 0.5
    assert taught({(3, 2): False, (3, 1): True}).rate(0, (3, 3)) < 0.5


def test_the_width_shares_the_budget() -> None:
    """Halves go up."""
    for budget, depth, width in (
        (7, 2, 4),
        (9, 2, 5),
        (24, 5, 5),
        (5, 4, 1),
        (11, 4, 3),
        (2, 9, 1),
        (60, 2, 8),
    ):
        policy = prior(budget=budget, depth_min=depth, depth_start=depth, depth_max=depth, width_start=1)
        assert policy.shape(0, (0, 0)) == TreeShape(depth, width, budget)


def test_bounds_hold_whatever_happens() -> None:
    bounds = {
        "depth_min": 2,
        "depth_start": 3,
        "depth_max": 4,
        "width_min": 3,
        "width_start": 3,
        "width_max": 5,
    }
    easy, hard = prior(**bounds, budget=6), prior(**bounds, budget=60)
    for row in range(8):
        for column in range(0, 8, 2):
            easy.observe(0, 2, 2, [(row, column), (row, column + 1), (row, column + 2)])
            hard.observe(0, 0, 4, [(row, column)])
    assert easy.shape(0, (8, 3)) == TreeShape(4, 3, 6)
    assert hard.shape(0, (8, 3)) == TreeShape(2, 5, 60)


def test_easy_regions_get_deeper_and_narrower_trees() -> None:
    """The left half takes every draft, the right half none."""
    policy = taught({(row, column): column < 8 for row in range(4) for column in range(16)})
    easy, hard = policy.shape(0, (4, 4)), policy.shape(0, (4, 12))
    assert easy.depth > hard.depth and easy.width < hard.width


def test_a_costlier_level_makes_trees_shallower() -> None:
    cheap, dear = prior(level_cost=0.01), prior(level_cost=0.5)
    assert cheap.shape(0, (0, 0)).depth > dear.shape(0, (0, 0)).depth


def test_a_new_image_starts_over_and_slots_are_apart() -> None:
    policy = prior(slots=2)
    start = policy.shape(0, (0, 1))
    policy.observe(0, 5, 5, [(0, column) for column in range(1, 7)])
    assert policy.shape(0, (0, 6)).depth > start.depth
    assert policy.shape(1, (0, 6)) == start
    policy.reset(0, seed=3)
    assert policy.shape(0, (0, 6)) == start
