"""`--total_token auto` and 1: the size chosen by a simulated clock, and images that do not depend on it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adt_tree.errors import UserError
from adt_tree.fastest_size import CPU_SIZES, TIMED_STEPS, AutoTree, FastestSize
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.records import Step
from adt_tree.settings import Lantern, Sampling
from lab.settings import Control
from tests.conftest import Run
from tests.support.decoding import codes_of

SHAPES = AutoTree().shapes(Grid(16, 16), on_gpu=False)
TRIALS = len(SHAPES) * TIMED_STEPS  # steps in which sizes are timed


class Clock:
    """Runs a policy. Its time is what `ms` returns for the drafted nodes and the earlier steps with them."""

    def __init__(self, policy: FastestSize, ms: Callable[[int, int], float], accepted: float = 0.5) -> None:
        """accepted: share of the drafted nodes."""
        self._policy, self._ms, self._accepted = policy, ms, accepted
        self._earlier = Counter[int]()

    def run(self, steps: int, images: int = 1) -> list[int]:
        """Returns the sizes of the steps, with as many images in flight."""
        sizes = []
        for _ in range(steps):
            shapes = self._policy.shapes(dict.fromkeys(range(images), 0))
            (shape,) = set(shapes.values())
            ms = self._ms(shape.budget, self._earlier[shape.budget])
            self._earlier[shape.budget] += 1
            accepted = int(self._accepted * shape.depth)
            step = Step(0, 0, 0, shape.depth, 1, shape.budget, accepted, ms)
            self._policy.observe(dict.fromkeys(range(images), step))
            sizes.append(shape.budget)
        return sizes


def policy(on_gpu: bool = False) -> FastestSize:
    return FastestSize(SHAPES, 16, on_gpu)


def test_every_size_is_timed_in_turn() -> None:
    assert Clock(policy(), lambda nodes, earlier: 1.0).run(TRIALS) == [*CPU_SIZES] * TIMED_STEPS


@pytest.mark.parametrize(
    ("ms", "best"),
    [
        (lambda nodes, earlier: 1.0, 31),
        (lambda nodes, earlier: 1.0 + nodes, 3),
        (lambda nodes, earlier: 1.0 if nodes <= 15 else 2.0, 15),
        # Of the timed steps the shortest counts.
        (lambda nodes, earlier: 9.0 if nodes == 31 and earlier != 2 else 1.0, 31),
        # The first step of a size records graphs.
        (lambda nodes, earlier: 99.0 if nodes < 31 and not earlier else 1.0 + nodes, 3),
    ],
)
def test_the_fastest_size_is_chosen(ms: Callable[[int, int], float], best: int) -> None:
    assert set(Clock(policy(), ms).run(TRIALS + 50)[TRIALS:]) == {best}


def test_size_follows_acceptance_when_an_image_begins() -> None:
    """A tree of 31 nodes takes 1.6 times as long as one of 3. It is chosen as long as half of its codes are
    accepted, and no longer after many steps that accepted none."""
    rule = policy()
    ms = lambda nodes, earlier: 1 + nodes / 50  # noqa: E731
    assert set(Clock(rule, ms).run(TRIALS + 200)[TRIALS:]) == {31}
    rejecting = Clock(rule, ms, accepted=0.0)
    assert set(rejecting.run(1000)) == {31}
    rule.reset(0, seed=1)
    assert set(rejecting.run(10)) == {3}


def test_other_numbers_of_images_are_timed_anew_on_a_cpu() -> None:
    def ms(images: int) -> Callable[[int, int], float]:
        return lambda nodes, earlier: 1.0 + (images > 1) * nodes

    for on_gpu, later in ((False, 3), (True, 31)):
        rule = policy(on_gpu)
        assert Clock(rule, ms(1)).run(TRIALS + 1)[-1] == 31
        assert Clock(rule, ms(4)).run(TRIALS + 1, images=4)[-1] == later
        assert Clock(rule, ms(1)).run(1)[-1] == 31


def test_cut_trees_and_steps_without_results_are_not_timed() -> None:
    rule = policy()
    for _ in range(TRIALS):
        rule.shapes({0: 250, 1: 250})
        rule.observe({0: Step(250, 15, 10, 2, 1, 2, 2, ms=0.1)})
        rule.observe({})
    assert rule.shapes({0: 0, 1: 0})[0] == SHAPES[0]


@pytest.mark.parametrize(
    ("grid", "on_gpu", "sizes"),
    [
        (Grid(32, 32), False, [3, 7, 15, 19, 31]),
        (Grid(32, 32), True, [7, 15, 31]),
        (Grid(4, 4), False, [3, 7]),  # a deeper tree would be cut in every step but the first
        (Grid(1, 3), True, [1]),
    ],
)
def test_sizes_fit_the_grid(grid: Grid, on_gpu: bool, sizes: list[int]) -> None:
    assert [shape.budget for shape in AutoTree().shapes(grid, on_gpu)] == sizes


def test_codes_do_not_depend_on_sizes(pipe: Pipeline) -> None:
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza"], seed=5)
    plain = pipe.engine(pipe.method("ar"), requests, 3)
    engine = pipe.engine(pipe.method("self-draft"), requests, 3)
    assert engine.method.tree == AutoTree()
    images = list(engine.decode(requests))
    assert codes_of(images) == codes_of(plain.decode(requests))
    assert len({step.budget for image in images for step in image.steps}) > 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("self-draft", {"lantern": Lantern()}),
        ("self-draft", {"relaxed": Control("accept-all")}),
        ("eagle-2", {}),
        ("adt-tree", {}),
        ("sjd", {}),
    ],
)
def test_auto_is_refused_where_the_image_depends_on_trees(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"tree auto|type TreeShape|type AdaptiveTree"):
        Method(name, Sampling(), AutoTree(), **settings)


@pytest.mark.parametrize(
    ("name", "tree"), [("eagle-2", TreeShape(0, 4, 0)), ("adt-self-draft", AdaptiveTree(budget=0))]
)
def test_one_node_is_the_loop_of_the_ar_baseline(
    name: str, tree: TreeShape | AdaptiveTree, pipe: Pipeline
) -> None:
    requests = pipe.requests(["red heart", "sun"], seed=5)
    plain, engine = (
        pipe.engine(method, requests) for method in (pipe.method("ar"), pipe.method(name, tree=tree))
    )
    assert engine.max_nodes == 1
    assert codes_of(engine.decode(requests)) == codes_of(plain.decode(requests))


def test_a_run_says_auto_and_continues(generate: Run, tmp_path: Path) -> None:
    for skipped in (0, 5):
        status, out, err = generate("auto", "--method", "self-draft")
        assert status == 0, err
        assert json.loads(out.splitlines()[-1])["skipped"] == skipped
    assert '"auto"' in (tmp_path / "auto" / "generation_configs.json").read_text()
