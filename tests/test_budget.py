"""Trees sized while decoding: the choice under constructed costs, and images that do not depend on it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from adt_tree.budget.acceptance import Levels
from adt_tree.budget.candidates import AutoTree
from adt_tree.budget.policy import (
    EARLY_STEPS,
    FIRST_STEPS,
    PERIOD,
    TRIAL_LOSS,
    WARM_UP,
    CostAware,
)
from adt_tree.decode import finished, speculative
from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.method import Lantern, Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import AdaptiveTree, AdjacencyAdaptive, TreeShape, self_drafted
from adt_tree.records import Step
from adt_tree.roles import MOST_UNREAD_PAIRS
from adt_tree.sampling import Sampling
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run
from tests.decoding import codes_of

CANDIDATES = AutoTree().candidates(row_width=16, buckets=False)
PLAIN = CANDIDATES[0]
POSITIONS = 256  # codes of an image


def simulate(
    cost_ms: Callable[[int], float],
    steps: int,
    slots: int = 1,
    seed: int = 1,
    right: Callable[[int], float] = lambda nodes: 0.8,
) -> list[TreeShape]:
    """Returns the shapes of a run. cost_ms: time of a step, and right: probability that a draft is right, by
    the number of drafted nodes."""
    policy, generator, used = CostAware(CANDIDATES, POSITIONS), random.Random(seed), []
    codes = [0] * slots  # of each image, after the first one
    for _ in range(steps):
        shapes = policy.shapes(dict(enumerate(codes)))
        (shape,) = set(shapes.values())  # images of one step have trees of one shape
        used.append(shape)
        ms = cost_ms(shape.budget) * generator.uniform(0.9, 1.1)
        accepted = {
            slot: next(
                (n for n in range(shape.depth) if generator.random() > right(shape.budget)), shape.depth
            )
            for slot in shapes
        }
        policy.observe({slot: step(shape, number, ms, codes[slot] + 1) for slot, number in accepted.items()})
        for slot, number in accepted.items():
            codes[slot] = codes[slot] + number + 1 if codes[slot] + number < 255 else 0
    return used


def step(shape: TreeShape, accepted: int, ms: float, position: int = 0) -> Step:
    return Step(position, 0, 0, shape.depth, shape.width, shape.budget, accepted, ms)


def share(shapes: Iterable[Hashable], shape: Hashable) -> float:
    """Returns the share of `shapes` that equal `shape`."""
    counts = Counter(shapes)
    return counts[shape] / counts.total()


def test_rows_that_cost_a_full_pass_leave_plain_decoding() -> None:
    """Trials go on. A step of three drafts commits 2.95 codes in the time of 4 plain steps, so it loses about
    a quarter of its time. All trials may lose the share TRIAL_LOSS of the run, and that of EARLY_STEPS more
    steps."""
    used = simulate(lambda nodes: 1.0 + nodes, 6000)[300:]
    assert share(used, PLAIN) >= 0.97
    trials = [shape.budget for shape in used if shape.budget > 1]
    assert trials, "it must still draft now and then"
    assert sum(1 + nodes for nodes in trials) / 4 <= TRIAL_LOSS * (6000 + EARLY_STEPS)


def test_a_batch_seldom_drafts_if_rows_cost_a_full_pass() -> None:
    """A step of a trial loses about a quarter of its time here as well."""
    used = simulate(lambda nodes: 1.0 + nodes, 20000, slots=4)[500:]
    trials = [shape.budget for shape in used if shape.budget > 1]
    assert trials and sum(1 + nodes for nodes in trials) / 4 <= TRIAL_LOSS * (20000 + EARLY_STEPS)


def test_free_rows_take_the_largest_tree() -> None:
    used = simulate(lambda nodes: 1.0, 400)
    assert share(used[200:], CANDIDATES[-1]) + share(used[200:], CANDIDATES[-2]) >= 0.9


def test_the_choice_is_that_of_most_codes_a_second() -> None:
    """With 0.8 per level and 0.05 of a pass per row, a chain of 7 commits 4.2 codes in 1.35 ms, one of 15
    commits 4.9 in 1.75 ms, and one of 3 commits 2.95 in 1.15 ms."""
    assert share(simulate(lambda nodes: 1 + 0.05 * nodes, 4000)[1000:], TreeShape(7, 1, 7)) >= 0.8


def test_a_deep_tree_is_found_whose_nodes_refine_far_more_than_assumed() -> None:
    """Chains of 15 accept 1.5 times as many codes of the first 7 levels as chains of 7, as with random
    weights. In 1 + 0.1 ms per node they commit 2.9 codes per ms, and chains of 7 2.3. But at first nodes of
    deep trees cost twice as much. If trials were compared in milliseconds, in which those of the chain of 3
    lose least, none of the last steps would have a chain of 15."""

    def shares(seed: int) -> float:
        calls = count()

        def cost(nodes: int) -> float:
            return 1 + (0.2 if next(calls) < 100 and nodes > 7 else 0.1) * nodes

        used = simulate(
            cost, 8000, seed=seed, right=lambda nodes: 0.88 if nodes > 7 else 0.7 + 0.02 * (nodes - 3)
        )
        return share(used[-2000:], TreeShape(15, 1, 15))

    assert sum(map(shares, range(8))) / 8 >= 0.7


def test_the_first_steps_after_a_change_of_depth_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts if it is no plain one and the WARM_UP steps before it had trees as deep as its own."""
    counted: list[int] = []
    monkeypatch.setattr(Levels, "count", lambda *arguments: counted.append(len(used) - 1))
    policy, used = CostAware(CANDIDATES, POSITIONS), list[int]()
    for _ in range(1000):
        shape = policy.shapes({0: 1})[0]
        used.append(shape.depth)
        policy.observe({0: step(shape, shape.depth, 1.0 + 0.1 * shape.budget)})
    expected = [
        number for number, depth in enumerate(used)
        if depth and number >= WARM_UP and set(used[number - WARM_UP : number]) == {depth}
    ]  # fmt: skip
    assert counted == expected and len({*used}) > 2


@pytest.mark.parametrize(
    ("slots", "loss", "chosen"),
    [(1, 0.5, TreeShape(3, 1, 3)), (4, 0.05, TreeShape(3, 1, 3)), (4, 0.2, PLAIN)],
)
def test_a_batch_drafts_for_a_clear_gain(
    slots: int, loss: float, chosen: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of three drafts commits 2.95 codes in 2.2 ms, so its gain over plain steps of 1 ms is 1.34. Four
    images that lose 0.2 for each doubling must gain 1.4."""
    monkeypatch.setattr("adt_tree.budget.policy.STEP_LOSS", loss)
    cost = {0: 1.0, 1: 1.8, 3: 2.2}
    used = simulate(lambda nodes: cost.get(nodes, 9.0), 3000, slots)
    assert used[:PERIOD] == [PLAIN] * PERIOD
    assert share(used[-1000:], chosen) > 0.8


def test_plain_decoding_is_tried_again_after_a_batch_has_left_it() -> None:
    for seed in range(3):
        used = simulate(lambda nodes: 1 + 0.04 * nodes, 16000, slots=4, seed=seed)
        assert PERIOD <= used[-15000:].count(PLAIN) <= 2 * TRIAL_LOSS * 15000, f"seed {seed}"


def test_rows_that_cost_too_much_are_not_even_tried() -> None:
    """A plain step takes 1 ms and one of seven drafts 13 ms. No tree is hoped to commit 13 codes, so none
    that takes at least as long can be better."""
    cost = {0: 1.0, 3: 3.2, 7: 13.0}
    used = simulate(lambda nodes: cost.get(nodes, 100.0), 1000)
    assert {shape.budget for shape in used} == {0, 3, 7}


def test_a_slow_moment_in_the_first_trials_is_forgotten() -> None:
    """Rows are free, so the largest tree is best. But the first trials of trees are slowed down three
    times."""
    calls = 0

    def cost(nodes: int) -> float:
        nonlocal calls
        calls += 1
        return 3.0 if PERIOD < calls <= PERIOD + 2 * (WARM_UP + FIRST_STEPS) else 1.0

    used = simulate(cost, 1000)
    assert share(used[-500:], CANDIDATES[-1]) + share(used[-500:], CANDIDATES[-2]) >= 0.9


def test_a_first_trial_that_the_end_of_an_image_cut_is_made_up_for() -> None:
    """The chain of 15 is best, but the whole first trial of it is cut to 14 levels, so nothing is timed."""
    best, policy, used = TreeShape(15, 1, 15), CostAware(CANDIDATES, POSITIONS), Counter[TreeShape]()
    for _ in range(3000):
        shape = policy.shapes({0: 1})[0]
        depth = 14 if shape == best and used[best] < WARM_UP + FIRST_STEPS else shape.depth
        used[shape] += 1
        ms = 1 + 0.02 * shape.budget
        accepted = min(2 * depth // 3, 9)
        policy.observe({0: step(TreeShape(depth, shape.width, depth), accepted, ms)})
    assert used[best] >= 2400


def test_a_device_that_becomes_slower_does_not_change_the_choice() -> None:
    """The chain of 7 is best. After 1000 steps every pass takes twice as long, whatever its size, so the
    chain of 7 stays best, although all others were timed before."""
    shares = []
    for seed in range(10):
        calls = count()
        used = simulate(
            lambda nodes: (1 + 0.05 * nodes) * (1.0 if next(calls) < 1000 else 2.0),  # noqa: B023
            1100,
            slots=4,
            seed=seed,
        )
        shares.append(share(used[1000:], TreeShape(7, 1, 7)))
    assert sum(shares) / len(shares) >= 0.55


def test_plain_decoding_is_left_when_rows_become_cheap() -> None:
    calls = 0

    def cost(nodes: int) -> float:
        nonlocal calls
        calls += 1
        return 1.0 + nodes * (1.0 if calls < 1000 else 0.0)

    used = simulate(cost, 8000)
    assert share(used[300:1000], PLAIN) > 0.9 and share(used[-500:], PLAIN) < 0.1


class Forced:
    """A policy that cycles through shapes, as if another machine had chosen them. The images of one step have
    shapes that follow one another."""

    bounds = PLAIN

    def __init__(self, shapes: list[TreeShape]) -> None:
        self._shapes = cycle(shapes)

    def reset(self, slot: int, seed: int) -> None: ...

    def shapes(self, roots: Mapping[int, int]) -> dict[int, TreeShape]:
        return {slot: next(self._shapes) for slot in roots}

    def observe(self, steps: Mapping[int, Step]) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_codes_do_not_depend_on_the_choice(pipe: Pipeline, temperature: float, batch_size: int) -> None:
    sampling = Sampling(temperature, guidance=3.0)
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza"], seed=5)

    plain = pipe.engine(pipe.method("ar", sampling=sampling), requests, batch_size)
    expected = codes_of(plain.decode(requests))
    engine = pipe.engine(pipe.method("self-draft", sampling=sampling), requests, batch_size)
    assert engine.method.tree == AutoTree()
    assert codes_of(engine.decode(requests)) == expected
    # The image is so small that the largest tree is not among the candidates of this engine.
    engine = pipe.engine(replace(engine.method, tree=self_drafted(31)), requests, batch_size)
    assert engine.drafting is not None
    proposer, _, rule = engine.drafting
    for schedule in (list(CANDIDATES), [self_drafted(31), PLAIN, PLAIN, TreeShape(3, 1, 3)]):
        outputs = speculative(engine.target, proposer, Forced(schedule), rule, requests, sampling)
        assert codes_of(finished(outputs)) == expected


@pytest.mark.parametrize(
    ("name", "tree", "settings"),
    [
        ("self-draft", AutoTree(), {"lantern": Lantern()}),
        ("self-draft", AutoTree(), {"control": "accept-all"}),
        ("self-draft", AutoTree(TreeShape(5, 4, 10)), {}),
        ("eagle-2", AutoTree(), {}),
        ("eagle-2", AutoTree(TreeShape(5, 4, 10)), {"verify": "rejection"}),
        ("adt-tree", AutoTree(AdaptiveTree()), {"lantern": Lantern()}),
        ("adt-tree", AutoTree(TreeShape(5, 4, 10)), {}),
    ],
)
def test_auto_is_refused_where_the_image_depends_on_trees(
    name: str, tree: AutoTree, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="total_token auto"):
        Method(name, Sampling(), tree, **settings)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--method adt-self-draft --total_token auto", "total_token"),
        ("--method eagle-2 --total_token auto --lantern", "total_token"),
        ("--method eagle-2 --total_token auto --verify rejection", "total_token"),
        ("--method eagle-2 --total_token auto --depth 4", "--depth 4"),
        ("--method self-draft --total_token 1 --depth 4", "--depth 4"),
        ("--total_token 0", "total_token"),
        ("--method self-draft --lantern --total_token auto", "total_token"),
        ("--method self-draft --total_token auto --depth 4", "--depth 4"),
        ("--total_token several", "total_token"),
    ],
)
def test_auto_on_the_command_line(words: str, named: str, refused: Refused) -> None:
    assert named in refused("generate_images", *words.split())


@pytest.mark.parametrize("method", ["eagle-2", "adt-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_codes_of_a_drafter_network_do_not_depend_on_the_choice(
    pipe: Pipeline, method: str, temperature: float
) -> None:
    sampling, slots = Sampling(temperature, guidance=3.0), 3
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza"], seed=5)
    expected = codes_of(pipe.engine(pipe.method("ar", sampling=sampling), requests, slots).decode(requests))
    engine = pipe.engine(pipe.method(method, sampling=sampling, tree=AutoTree()), requests, slots)
    assert engine.method.tree == AutoTree(pipe.model.spec.default_tree(method))  # type: ignore[arg-type]
    assert codes_of(engine.decode(requests)) == expected and engine.drafting is not None
    proposer, _, rule = engine.drafting
    small, large = TreeShape(2, 3, 3), TreeShape(5, 4, 10)
    for schedule in ([large, PLAIN, PLAIN, small, PLAIN], [small, small, PLAIN, large]):
        outputs = speculative(engine.target, proposer, Forced(schedule), rule, requests, sampling)
        assert codes_of(finished(outputs)) == expected


@pytest.mark.parametrize("family", ["emoji", "lumina_mgpt"])
@pytest.mark.parametrize("alignment", ["published", "unshifted"])
@pytest.mark.parametrize("most_pairs", [2, MOST_UNREAD_PAIRS])
def test_a_drafter_reads_the_steps_that_it_did_not_draft(
    checkpoints: Checkpoints, family: str, alignment: str, most_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same position of an image it drafts the same tree, whether the steps before had trees or not."""
    monkeypatch.setattr("adt_tree.proposers.eagle.MOST_UNREAD_PAIRS", most_pairs)
    pipe = Pipeline(replace(checkpoints[family].load(), alignment=alignment))
    requests, shape = pipe.requests(["red heart", "sun", "rocket"], seed=5), TreeShape(2, 3, 4)
    method = pipe.method("eagle-2", sampling=Sampling(temperature=0.0), tree=shape)

    def drafts(schedule: list[TreeShape]) -> dict[tuple[str, int], list[int]]:
        trees = {}
        engine = pipe.engine(method, requests, batch_size=2)
        assert engine.drafting is not None
        proposer, _, rule = engine.drafting
        policy = Forced(schedule)
        for output in speculative(engine.target, proposer, policy, rule, requests, method.sampling):
            for slot, image in output.images:
                if image.steps[-1].depth == shape.depth:
                    trees[image.name, image.steps[-1].position] = output.tree.codes[slot].tolist()
        return trees

    always, sometimes = drafts([shape]), drafts([PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, shape, PLAIN])
    shared = always.keys() & sometimes.keys()
    assert len(shared) >= 3
    assert {place: always[place] for place in shared} == {place: sometimes[place] for place in shared}


def test_an_adaptive_tree_keeps_to_the_budget() -> None:
    base = AdaptiveTree()
    shapes = AutoTree(base).candidates(row_width=16, buckets=False)
    assert [shape.budget for shape in shapes] == [0, 3, 6, 10, 12]

    def budgets(row_ms: float) -> list[int]:
        policy, used = (
            CostAware(shapes, 640, AdjacencyAdaptive(base, 1, Grid(40, 16)), self_drafted=False),
            [],
        )
        policy.reset(0, seed=1)
        for number in range(300):
            shape = policy.shapes({0: number})[0]
            assert shape.depth <= min(8, shape.budget) and shape.width <= 4
            used.append(shape.budget)
            ms = 1.0 + row_ms * shape.budget
            policy.observe({0: step(shape, min(2, shape.depth), ms)})
        return used

    dear = budgets(row_ms=1.0)
    assert share(dear[-100:], 0) > 0.9
    # The smallest tree alone is tried.
    assert dear[PERIOD : PERIOD + FIRST_STEPS] == [3] * FIRST_STEPS and set(dear) == {0, 3}
    free = budgets(row_ms=0.0)
    assert set(free) == {0, 3, 6, 10, 12} and share(free[-100:], 0) < 0.1


def test_one_node_is_plain_decoding(generate: Run) -> None:
    status, out, err = generate("one", "--total_token", "1", "--batch_size", "2")
    assert status == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["tau"], summary["tree_sizes"]) == (1.0, {"1": 1.0})


def test_a_run_says_auto_and_continues(generate: Run, tmp_path: Path) -> None:
    for skipped in (0, 5):
        status, out, err = generate("auto", "--method", "adt-tree", "--total_token", "auto")
        assert status == 0, err
        summary = json.loads(out.splitlines()[-1])
        assert summary["skipped"] == skipped and len(summary["tree_sizes"]) > 1
        assert sum(summary["tree_sizes"].values()) == pytest.approx(1, abs=0.001)
    settings = (tmp_path / "auto" / "generation_configs.json").read_text()
    assert "auto, from AdaptiveTree" in settings
