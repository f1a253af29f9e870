"""Cells by position, and the tree shape at each cell: the adaptive tree's update as a table."""

from __future__ import annotations

import pytest

from adt_tree.grid import Grid, Raster
from adt_tree.policy import INITS, AdaptiveTree, AdjacencyAdaptive, TreeShape
from adt_tree.records import Step

BUDGET = AdaptiveTree().budget
START = {"depth_start": 4, "width_start": 4, "depth_max": 6, "width_max": 6, "depth_min": 2, "width_min": 2}
STILL = {"step_depth": 0, "step_width": 0}


GRID = Grid(4, 40)


def adaptive(
    init: str = "horizontal", slots: int = 1, grid: Grid = GRID, **changes: float
) -> AdjacencyAdaptive:
    """Returns a policy with every slot reset."""
    policy = AdjacencyAdaptive(AdaptiveTree(**{**START, "init": init, **changes}), slots, grid)
    for slot in range(slots):
        policy.reset(slot, seed=slot)
    return policy


def shape(policy: AdjacencyAdaptive, root: int, slot: int = 0) -> TreeShape:
    """Returns the shape of the tree whose root has the position `root`."""
    return policy.shapes({slot: root})[slot]


def observe(policy: AdjacencyAdaptive, position: int, accepted: int, depth: int) -> None:
    """Gives the policy a step whose tree had `depth` levels, of which `accepted` were accepted. It committed
    accepted + 1 codes from `position` on."""
    cell = policy._grid.cell(position)
    step = Step(position, cell.row, cell.column, depth, width=1, nodes=depth, accepted=accepted, ms=1.0)
    policy.observe({0: step})


@pytest.mark.parametrize(
    ("depth", "width", "accepted", "expected", "changes"),
    [
        (4, 4, 4, (5, 3), {}),  # alpha 1: deeper and narrower
        (4, 4, 2, (5, 3), {}),  # alpha = beta counts as success
        (4, 4, 1, (3, 5), {}),  # below: shallower and wider
        (4, 4, 0, (3, 5), {}),
        (5, 4, 2, (4, 5), {}),  # 2 / 5 < 0.5
        (5, 4, 3, (6, 3), {}),
        (6, 2, 6, (6, 2), {}),  # both clamped
        (6, 4, 6, (6, 3), {}),  # depth clamped
        (4, 2, 4, (5, 2), {}),  # width clamped
        (2, 6, 0, (2, 6), {}),
        (2, 4, 0, (2, 5), {}),
        (4, 6, 0, (3, 6), {}),
        (4, 4, 4, (6, 3), {"step_depth": 2}),
        (4, 4, 4, (6, 3), {"step_depth": 3}),  # a step may be cut by the bound
        (4, 4, 0, (3, 6), {"step_width": 2}),
        (4, 4, 4, (4, 4), STILL),
        (4, 4, 0, (5, 3), {"beta": 0.0}),
        (4, 4, 3, (3, 5), {"beta": 1.0}),
    ],
)
def test_update(
    depth: int, width: int, accepted: int, expected: tuple[int, int], changes: dict[str, float]
) -> None:
    policy = adaptive(depth_start=depth, width_start=width, **changes)
    assert shape(policy, root=0) == TreeShape(depth, width, BUDGET)
    observe(policy, 1, accepted, depth)
    assert shape(policy, root=2) == TreeShape(*expected, BUDGET)


def test_the_rate_is_that_of_the_drafted_levels() -> None:
    """A tree that was cut is judged by the levels that it drafted, and a tree without levels leaves the rate
    as it was. All cells that a step commits store its depth and width."""
    policy = adaptive()
    shape(policy, root=0)
    observe(policy, 1, accepted=1, depth=2)  # of 4 levels asked for, 2 were drafted
    assert shape(policy, root=2).depth == 5
    observe(policy, 3, accepted=0, depth=0)
    # The states of cells 1 and 2 have depth 4; the last rate is still 1 of 2, so the tree becomes deeper.
    assert shape(policy, root=2).depth == shape(policy, root=3).depth == 5
    assert shape(policy, root=4).depth == 6


@pytest.mark.parametrize(
    ("init", "cell", "states", "expected"),
    [
        *((init, (0, 0), {}, (4, 4)) for init in INITS),  # no cell has a state: the start values
        ("horizontal", (1, 1), {(1, 0): (3, 5), (0, 1): (4, 4)}, (3, 5)),
        ("horizontal", (2, 0), {(1, 0): (3, 5)}, (3, 5)),  # the first column looks above
        ("vertical", (1, 1), {(1, 0): (3, 5), (0, 1): (4, 4)}, (4, 4)),
        ("vertical", (0, 2), {(0, 1): (4, 4)}, (4, 4)),  # the first row looks left
        ("both", (1, 1), {(1, 0): (2, 2), (0, 1): (5, 4)}, (4, 3)),  # the mean, rounded up
        ("both", (1, 1), {(1, 0): (2, 6)}, (2, 6)),
        ("both", (1, 1), {(0, 1): (2, 6)}, (2, 6)),
    ],
)
def test_neighbours(
    init: str,
    cell: tuple[int, int],
    states: dict[tuple[int, int], tuple[int, int]],
    expected: tuple[int, int],
) -> None:
    policy = adaptive(init, **STILL)
    policy._memory[0].states.update(states)
    assert shape(policy, cell[0] * GRID.width + cell[1]) == TreeShape(*expected, BUDGET)


def test_random_repeat_takes_a_decoded_cell_and_follows_the_seed() -> None:
    def shapes(seed: int) -> list[TreeShape]:
        policy = adaptive("random", **STILL)
        policy.reset(0, seed)
        policy._memory[0].states.update({(0, n): (2 + n % 5, 6 - n % 5) for n in range(10)})
        return [shape(policy, GRID.width + n) for n in range(40)]

    chosen = shapes(1)
    assert {(tree.depth, tree.width) for tree in chosen} == {(2 + n, 6 - n) for n in range(5)}
    assert shapes(1) == chosen
    assert shapes(2) != chosen


TWO = Grid(3, 2, before=(Raster(2, 3),))


def test_a_position_counts_through_all_rasters() -> None:
    cells = [TWO.cell(position) for position in range(TWO.size)]
    preview = [(row, column, 0) for row in range(2) for column in range(3)]
    assert cells == preview + [(row, column, 1) for row in range(3) for column in range(2)]
    assert (TWO.size, TWO.starts, TWO.image) == (12, (0, 6), Raster(3, 2))


@pytest.mark.parametrize("accepted", [2, 3, 4])
def test_a_further_raster_begins_as_an_image_does(accepted: int) -> None:
    """The first tree of a raster has the start values, at whatever cell it begins. Later trees look only at
    the cells of their raster."""
    policy = adaptive(grid=Grid(3, 4, before=(Raster(1, 4),)))
    shape(policy, root=0)
    observe(policy, 1, accepted=0, depth=4)
    assert shape(policy, root=1) == TreeShape(3, 5, BUDGET)
    observe(policy, 2, accepted, depth=4)  # the last of its codes are the first ones of the image
    first = 2 + accepted
    assert shape(policy, first) == TreeShape(4, 4, BUDGET)
    observe(policy, first + 1, accepted=4, depth=4)
    assert shape(policy, first + 1) == TreeShape(5, 3, BUDGET)
