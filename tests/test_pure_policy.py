"""Which shape at which cell: the adaptive tree's update as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from adt_tree.policy import INITS, SELF_DRAFTED, AdaptiveTree, AdjacencyAdaptive, Cell, Fixed, TreeShape

BUDGET = AdaptiveTree().budget
START = {"depth_start": 4, "width_start": 4, "depth_max": 6, "width_max": 6, "depth_min": 2, "width_min": 2}


def adaptive(init: str = "horizontal", slots: int = 1, **changes: float) -> AdjacencyAdaptive:
    """A policy with every slot reset."""
    policy = AdjacencyAdaptive(AdaptiveTree(**{**START, "init": init, **changes}), slots)
    for slot in range(slots):
        policy.reset(slot, seed=slot)
    return policy


def step(policy: AdjacencyAdaptive, cell: Cell, accepted: int, committed: list[Cell]) -> tuple[int, int]:
    """Ask for a shape, report its outcome; the shape."""
    shape = policy.shape(0, cell)
    policy.observe(0, accepted, shape.depth, committed)
    return shape.depth, shape.width


def after(depth: int, width: int, accepted: int, **changes: float) -> tuple[int, int]:
    """The shape that follows a tree of the given shape and outcome."""
    policy = adaptive(depth_start=depth, width_start=width, **changes)
    assert step(policy, (0, 0), accepted, [(0, 1)]) == (depth, width)
    shape = policy.shape(0, (0, 1))
    return shape.depth, shape.width


@pytest.mark.parametrize(
    ("depth", "width", "accepted", "expected"),
    [
        (4, 4, 4, (5, 3)),  # alpha 1: deeper and narrower
        (4, 4, 2, (5, 3)),  # alpha = beta counts as success
        (4, 4, 1, (3, 5)),  # below: shallower and wider
        (4, 4, 0, (3, 5)),
        (5, 4, 2, (4, 5)),  # 2 / 5 < 0.5
        (5, 4, 3, (6, 3)),
        (6, 2, 6, (6, 2)),  # both clamped
        (6, 4, 6, (6, 3)),  # depth clamped
        (4, 2, 4, (5, 2)),  # width clamped
        (2, 6, 0, (2, 6)),
        (2, 4, 0, (2, 5)),
        (4, 6, 0, (3, 6)),
    ],
)
def test_update(depth: int, width: int, accepted: int, expected: tuple[int, int]) -> None:
    assert after(depth, width, accepted) == expected


@pytest.mark.parametrize(
    ("changes", "accepted", "expected"),
    [
        ({"step_depth": 2}, 4, (6, 3)),
        ({"step_depth": 3}, 4, (6, 3)),  # a step may be cut by the bound
        ({"step_width": 2}, 0, (3, 6)),
        ({"step_depth": 0, "step_width": 0}, 4, (4, 4)),
        ({"beta": 0.0}, 0, (5, 3)),
        ({"beta": 1.0}, 3, (3, 5)),
    ],
)
def test_constants(changes: dict[str, float], accepted: int, expected: tuple[int, int]) -> None:
    assert after(4, 4, accepted, **changes) == expected


def test_the_rate_is_that_of_the_drafted_levels() -> None:
    """A tree that was cut is judged by what it drafted; one that drafted nothing teaches nothing."""
    policy = adaptive()
    policy.shape(0, (0, 0))
    policy.observe(0, 1, 2, [(0, 1)])  # of 4 levels asked for, 2 were drafted
    assert policy.shape(0, (0, 1)).depth == 5
    policy.observe(0, 0, 0, [(0, 2)])
    assert policy.shape(0, (0, 2)).depth == 5  # the state 4 of (0, 1), moved by the rate of before


# A raster of 3 columns whose first row ends with three distinct states.
def painted(init: str) -> AdjacencyAdaptive:
    """(0, 1) holds (4, 4), (0, 2) and (1, 0) hold (3, 5); the last rate failed."""
    policy = adaptive(init)
    assert step(policy, (0, 0), 0, [(0, 1)]) == (4, 4)
    assert step(policy, (0, 1), 0, [(0, 2), (1, 0)]) == (3, 5)
    return policy


@pytest.mark.parametrize(
    ("init", "cell", "expected"),
    [
        ("horizontal", (1, 1), (2, 6)),  # its left neighbour (1, 0): (3, 5)
        ("horizontal", (2, 0), (2, 6)),  # the first column looks above, at (1, 0)
        ("vertical", (1, 1), (3, 5)),  # above: (0, 1) with (4, 4)
        ("vertical", (0, 2), (3, 5)),  # the first row looks left, at (0, 1)
        ("both", (1, 1), (3, 6)),  # left (3, 5), above (4, 4): (4, 5), moved by the failure
    ],
)
def test_neighbours(init: str, cell: Cell, expected: tuple[int, int]) -> None:
    shape = painted(init).shape(0, cell)
    assert (shape.depth, shape.width) == expected


def test_the_mean_of_both_is_rounded_up() -> None:
    policy = painted("both")
    policy._memory[0].states.update({(1, 1): (2, 2), (0, 2): (6, 5)})
    shape = policy.shape(0, (1, 2))  # (4, 4), as 3.5 goes up
    assert (shape.depth, shape.width) == (3, 5)


@pytest.mark.parametrize("known", [(1, 0), (0, 1)])
def test_both_takes_the_one_there_is(known: Cell) -> None:
    policy = adaptive("both", step_depth=0, step_width=0)
    policy._memory[0].states[known] = (2, 6)
    assert policy.shape(0, (1, 1)) == TreeShape(2, 6, BUDGET)


def test_nothing_known_is_the_start() -> None:
    for init in INITS:
        assert adaptive(init).shape(0, (0, 0)) == TreeShape(4, 4, BUDGET)


def test_random_repeat_takes_a_decoded_cell_and_follows_the_seed() -> None:
    def shapes(seed: int) -> list[TreeShape]:
        policy = adaptive("random", step_depth=0, step_width=0)
        policy.reset(0, seed)
        policy._memory[0].states.update({(0, n): (2 + n % 5, 6 - n % 5) for n in range(10)})
        return [policy.shape(0, (1, n)) for n in range(40)]

    drawn = shapes(1)
    assert {(shape.depth, shape.width) for shape in drawn} == {(2 + n, 6 - n) for n in range(5)}
    assert shapes(1) == drawn
    assert shapes(2) != drawn


def test_a_new_image_starts_over_and_slots_are_apart() -> None:
    policy = adaptive(slots=2)
    assert step(policy, (0, 0), 4, [(0, 1)]) == (4, 4)
    assert policy.shape(1, (0, 1)) == TreeShape(4, 4, BUDGET)
    assert policy.shape(0, (0, 1)).depth == 5
    policy.reset(0, seed=3)
    assert policy.shape(0, (0, 1)) == TreeShape(4, 4, BUDGET)


def test_cut_at_the_end() -> None:
    shape = TreeShape(5, 4, 20)
    assert shape.cut(7) is shape
    assert shape.cut(5) is shape
    assert shape.cut(2) == TreeShape(2, 4, 20)
    assert shape.cut(0) == TreeShape(0, 4, 20)


def test_fixed_learns_nothing() -> None:
    policy = Fixed(TreeShape(5, 4, 20))
    policy.reset(0, 1)
    policy.observe(0, 5, 5, [(0, 1)])
    assert policy.shape(0, (3, 3)) == TreeShape(5, 4, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta": 1.1}, {"beta": -0.1}, {"init": "diagonal"}, {"depth_min": 0}, {"depth_start": 7},
        {"width_start": 1}, {"width_min": 5}, {"step_depth": -1}, {"step_width": -1}, {"budget": 0},
    ],
)  # fmt: skip
def test_wrong_constants_are_refused(wrong: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match="adt"):
        AdaptiveTree(**{**START, **wrong})


def test_negative_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        TreeShape(-1, 2, 3)


def test_the_method_states_the_constants_of_the_code() -> None:
    """docs/METHOD.md, section 4: one column for the network's trees, one for self-drafted ones."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "METHOD.md").read_text()
    block = text.split("<!-- constants:start -->")[1].split("<!-- constants:end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()[2:]]
    fields = (
        ("beta",),
        ("step_depth", "step_width"),
        ("depth_min", "depth_max"),
        ("width_min", "width_max"),
        ("depth_start", "width_start"),
        ("budget",),
    )
    for column, constants in ((2, AdaptiveTree()), (3, SELF_DRAFTED)):
        said = [row[column] for row in rows]
        assert said == [", ".join(f"{getattr(constants, name):g}" for name in names) for names in fields]
