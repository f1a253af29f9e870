"""Trees sized while decoding: the choice under constructed costs, and images that do not depend on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from adt_tree.batch import StepOutput
from adt_tree.budget import EXPLORE_EVERY, EXPLORE_STEPS, AutoTree, CostAware
from adt_tree.decode import speculative
from adt_tree.errors import UserError
from adt_tree.grid import Cell
from adt_tree.method import Lantern, Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape, self_drafted
from adt_tree.records import Step
from adt_tree.sampling import Sampling
from tests.conftest import Refused

CANDIDATES = AutoTree().candidates(row_width=16, buckets=False)
PLAIN = CANDIDATES[0]


def simulate(cost_ms: Callable[[int], float], steps: int, slots: int = 1) -> list[TreeShape]:
    """Returns the shapes of a run in which each draft is right with probability 0.8. cost_ms: time of a step,
    by its number of drafted nodes."""
    policy, generator, used = CostAware(CANDIDATES), random.Random(1), []
    for _ in range(steps):
        shapes = [policy.shape(slot, (0, 0)) for slot in range(slots)]
        assert len(set(shapes)) == 1, "images of one step have trees of one shape"
        used.append(shapes[0])
        for slot, shape in enumerate(shapes):
            accepted = next((n for n in range(shape.depth) if generator.random() > 0.8), shape.depth)
            ms = cost_ms(shape.budget) * generator.uniform(0.9, 1.1)
            policy.observe(slot, Step(0, 0, 0, shape.depth, shape.width, shape.budget, accepted, ms), [])
    return used


def share(shapes: Iterable[TreeShape], shape: TreeShape) -> float:
    counts = Counter(shapes)
    return counts[shape] / counts.total()


@pytest.mark.parametrize("slots", [1, 4])
def test_rows_that_cost_a_full_pass_leave_plain_decoding(slots: int) -> None:
    used = simulate(lambda nodes: 1.0 + nodes, 2000, slots)
    assert share(used[200:], PLAIN) >= 1 - 2 * EXPLORE_STEPS / EXPLORE_EVERY
    assert share(used[200:], PLAIN) < 1, "it must still draft now and then"


def test_free_rows_take_the_largest_tree() -> None:
    used = simulate(lambda nodes: 1.0, 400)
    assert share(used[200:], CANDIDATES[-1]) + share(used[200:], CANDIDATES[-2]) >= 0.9


def test_the_choice_is_that_of_most_codes_a_second() -> None:
    """With 0.8 per level and 0.05 of a pass per row, a chain of 7 commits 4.2 codes in 1.35 ms, one of 15
    commits 4.9 in 1.75 ms, and one of 3 commits 2.95 in 1.15 ms."""
    assert share(simulate(lambda nodes: 1 + 0.05 * nodes, 1200)[400:], TreeShape(7, 1, 7)) >= 0.6


def test_plain_decoding_is_left_when_rows_become_cheap() -> None:
    calls = 0

    def cost(nodes: int) -> float:
        nonlocal calls
        calls += 1
        return 1.0 + nodes * (1.0 if calls < 1000 else 0.0)

    used = simulate(cost, 4000)
    assert share(used[300:1000], PLAIN) > 0.9 and share(used[-500:], PLAIN) < 0.1


class Forced:
    """A policy that cycles through shapes, as if another machine had chosen them."""

    def __init__(self, shapes: list[TreeShape]) -> None:
        self.shapes, self.calls = shapes, 0

    def reset(self, slot: int, seed: int) -> None: ...

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        self.calls += 1
        return self.shapes[self.calls % len(self.shapes)]

    def observe(self, slot: int, step: Step, committed: list[Cell]) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_codes_do_not_depend_on_the_choice(pipe: Pipeline, temperature: float, batch_size: int) -> None:
    sampling = Sampling(temperature, guidance=3.0)
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza"], seed=5)

    def codes(outputs: Iterable[StepOutput]) -> dict[str, list[int]]:
        return {image.name: image.codes for output in outputs for image in output.finished}

    expected = codes(pipe.engine(pipe.method("ar", sampling=sampling), requests, batch_size).steps(requests))
    engine = pipe.engine(pipe.method("self-draft", sampling=sampling), requests, batch_size)
    assert engine.method.tree == AutoTree() and engine.drafting is not None
    assert codes(engine.steps(requests)) == expected
    proposer, _, rule = engine.drafting
    for schedule in (list(CANDIDATES), [self_drafted(31), PLAIN, PLAIN, TreeShape(3, 1, 3)]):
        outputs = speculative(engine.target, proposer, Forced(schedule), rule, requests, sampling)
        assert codes(outputs) == expected


@pytest.mark.parametrize("settings", [{"lantern": Lantern()}, {"control": "accept-all"}])
def test_auto_is_refused_where_the_image_depends_on_trees(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match="total_token auto"):
        Method("self-draft", Sampling(), AutoTree(), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--method eagle-2 --total_token auto", "total_token"),
        ("--method self-draft --lantern --total_token auto", "total_token"),
        ("--method self-draft --total_token auto --depth 4", "--depth 4"),
        ("--total_token several", "total_token"),
    ],
)
def test_auto_on_the_command_line(words: str, named: str, refused: Refused) -> None:
    assert named in refused("generate_images", *words.split())


def test_a_candidate_without_positions_is_left_out(pipe: Pipeline) -> None:
    """On a device of buckets and narrow rows every candidate that does not fit is dropped, not refused."""
    wide = AutoTree().candidates(row_width=48, buckets=True)
    assert [shape.budget + 1 for shape in wide] == [1, 8, 16, 32, 64]
    assert wide[-1].depth == 49 and CANDIDATES[-2] == TreeShape(15, 1, 15)
