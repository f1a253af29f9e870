"""Trials of candidates: in which order, what they are charged, and what a change of images does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from adt_tree.budget import policy as policy_module
from adt_tree.budget.candidates import AutoTree
from adt_tree.budget.policy import PERIOD, STAY, TRIAL_PART, WAIT_LOSS, WARM_UP, CostAware
from adt_tree.budget.times import StepTimes
from adt_tree.policy import PLAIN, AdaptiveTree, TreeShape
from adt_tree.records import Step
from tests.test_budget import CANDIDATES, POSITIONS, step


def run(policy: CostAware, slots: list[int], steps: int, row_ms: float) -> list[TreeShape]:
    """Returns the shapes of steps that take 1 ms, and row_ms more for every drafted node. All images stand at
    position 112 and accept two thirds of the drafts."""
    used = []
    for _ in range(steps):
        shapes = policy.shapes(dict.fromkeys(slots, 111))
        used.append(shapes[slots[0]])
        ms = 1.0 + row_ms * used[-1].budget
        policy.observe({slot: step(shape, 2 * shape.depth // 3, ms, 112) for slot, shape in shapes.items()})
    return used


def until_trial(policy: CostAware, slots: list[int], row_ms: float) -> float:
    """Decodes until the first step of a trial. Returns the time that trials had lost before it."""
    for _ in range(5000):
        before = policy._lost_ms
        run(policy, slots, 1, row_ms)
        if policy._chosen not in (None, policy._current):
            return before
    pytest.fail("nothing was tried")


def test_the_trial_that_costs_least_comes_first() -> None:
    """The chain of 15 is best. A trial of the tree with 4 leaves more costs least, because it is as deep. One
    of plain decoding costs most, but others must not keep it from being tried."""
    policy = CostAware(CANDIDATES, POSITIONS)
    until_trial(policy, [0], row_ms=0.1)
    best, leafy = TreeShape(15, 1, 15), CANDIDATES[4]
    assert policy._chosen is not None and policy._chosen.shape == best and policy._current.shape == leafy
    trials = [shape for shape in run(policy, [0], 12000, row_ms=0.1) if shape != best]
    assert set(trials) == {TreeShape(7, 1, 7), leafy, PLAIN}
    assert trials.count(PLAIN) < min(trials.count(leafy), trials.count(TreeShape(7, 1, 7)))


def test_with_a_drafter_network_plain_decoding_is_tried_first() -> None:
    """Other programs may have slowed down the first steps of the run, which were plain."""
    policy = CostAware(CANDIDATES, POSITIONS, self_drafted=False)
    until_trial(policy, [0], row_ms=0.1)
    assert policy._current.shape == PLAIN


def test_what_the_first_step_of_a_trial_takes_longer_counts_as_lost() -> None:
    """A drafter network reads all codes since its last tree. At most the time of PERIOD steps counts."""
    policy = CostAware(CANDIDATES, POSITIONS, self_drafted=False)
    until_trial(policy, [0], row_ms=0.9)
    trial, lost_ms = policy._current, policy._lost_ms
    expected = policy._ms(trial)
    policy.observe({0: step(trial.shape, 0, 4 * expected, 112)})
    assert policy._lost_ms == pytest.approx(lost_ms + 3 * expected)
    policy.observe({0: step(trial.shape, 0, 1e6, 112)})
    assert policy._lost_ms == pytest.approx(lost_ms + (3 + PERIOD) * expected)


def test_what_a_plain_step_takes_longer_out_of_step_counts_as_lost() -> None:
    """Three images that draft are out of step, so that plain steps are longer than they would be in step."""
    policy, roots = CostAware(CANDIDATES, POSITIONS), {0: 111, 1: 120, 2: 130}
    for _ in range(5000):
        shapes = policy.shapes(roots)
        if policy._chosen not in (None, policy._current) and shapes[0] == PLAIN:
            break
        depth = shapes[0].depth
        policy.observe({slot: step(shapes[slot], depth, 1 + 0.1 * depth, 112) for slot in roots})
    trial, lost_ms = policy._current, policy._lost_ms
    of_trial_ms, usual_ms = trial.lost_ms, policy._ms(trial)
    policy.observe({slot: step(PLAIN, 0, 1.5 * usual_ms, 112) for slot in roots})
    assert policy._lost_ms == pytest.approx(lost_ms + 0.5 * usual_ms)
    assert trial.lost_ms == pytest.approx(of_trial_ms + 0.5 * usual_ms)


def test_all_sizes_are_tried_anew_when_the_images_double() -> None:
    """Images 1 and 2 begin while image 0 is half done, so they are out of step, and plain steps count all the
    same. Later these numbers of images are known."""
    policy, used = CostAware(CANDIDATES, POSITIONS), list[TreeShape]()
    run(policy, [0], 300, row_ms=0.01)
    for number in range(40):
        shapes = policy.shapes({0: 100 + number, 1: number, 2: 2 * number})
        used.append(shapes[0])
        policy.observe({slot: step(shape, 0, 3.0 + shape.budget, 128) for slot, shape in shapes.items()})
    assert used[:PERIOD] == [PLAIN] * PERIOD and used[PERIOD] == CANDIDATES[1]
    assert policy._times.of(0, 3) == pytest.approx(3.0, rel=0.1)
    run(policy, [0], PERIOD, row_ms=0.01)
    run(policy, [0, 1, 2], 1, row_ms=0.01)
    assert not policy._untried


def test_a_trial_that_a_change_of_images_ends_is_charged_for_the_steps_that_ran() -> None:
    """While the batch decodes plainly, a chain is tried for WARM_UP + PERIOD steps. An image ends after the
    first of them."""
    policy = CostAware(CANDIDATES, POSITIONS)
    before = until_trial(policy, [0, 1, 2], row_ms=0.9)
    tried, charged = policy._current, policy._lost_ms - before
    assert policy._chosen is policy._candidates[0] and tried.lost_ms == charged > 0
    assert run(policy, [0, 1], PERIOD, row_ms=0.9) == [PLAIN] * PERIOD
    assert policy._lost_ms - before == pytest.approx(charged / (WARM_UP + PERIOD))
    assert tried.lost_ms == pytest.approx(charged / (WARM_UP + PERIOD))


def test_a_trial_goes_on_where_steps_do_not_depend_on_the_number_of_images() -> None:
    policy = CostAware(CANDIDATES, POSITIONS, idle_slots_cost=True)
    until_trial(policy, [0, 1, 2], row_ms=0.9)
    tried = policy._current.shape
    assert run(policy, [0, 1], WARM_UP + PERIOD, row_ms=0.9) == [*[tried] * (WARM_UP + PERIOD - 1), PLAIN]


def test_the_size_is_chosen_anew_when_a_batch_follows_its_last_image() -> None:
    """With one image rows are free, so the largest tree was chosen for many steps. With three images in
    flight that tree is far too slow."""
    policy = CostAware(CANDIDATES, POSITIONS)
    run(policy, [0, 1, 2], 400, row_ms=0.3)
    small = policy._chosen
    assert small is not None and small.shape.depth < 15
    largest = policy._candidates[-1]
    run(policy, [0], 100, row_ms=0.0)
    policy._chosen = policy._current = largest
    policy._scheduled.clear()
    policy._scheduled.extend([largest] * 20)
    assert run(policy, [0], 2, row_ms=0.0) == [largest.shape] * 2
    assert largest.shape not in run(policy, [0, 1, 2], PERIOD, row_ms=0.3)


@pytest.mark.parametrize(("idle_slots_cost", "expected"), [(False, {2, 3}), (True, {1})])
def test_times_are_kept_by_the_images_that_they_depend_on(
    idle_slots_cost: bool, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images stand at position 112 of 256, so they are a sixteenth less than half done."""
    counts = Counter[tuple[int, float]]()
    add = StepTimes.add

    def spy(self: StepTimes, candidate: int, images: int, ms: float, progress: float) -> None:
        counts[images, progress] += 1
        add(self, candidate, images, ms, progress)

    monkeypatch.setattr(StepTimes, "add", spy)
    policy = CostAware(CANDIDATES, POSITIONS, idle_slots_cost=idle_slots_cost)
    for slots in ([0, 1, 2], [0, 1]):
        run(policy, slots, 50, row_ms=0.1)
    assert {images for images, _ in counts} == expected and {progress for _, progress in counts} == {-0.0625}


@dataclass
class Counting:
    """An inner policy that counts how often it is asked, and what it learns."""

    bounds: TreeShape = PLAIN
    asked: int = 0
    observed: list[int] = field(default_factory=list)  # depth of each step

    def reset(self, slot: int, seed: int) -> None: ...

    def shapes(self, roots: Mapping[int, int]) -> dict[int, TreeShape]:
        self.asked += 1
        return dict.fromkeys(roots, TreeShape(2, 2, 10))

    def observe(self, steps: Mapping[int, Step]) -> None:
        self.observed += [step.depth for step in steps.values()]


def test_an_inner_policy_is_not_asked_for_trees_that_are_not_drafted() -> None:
    """Each answer of ADT-Tree moves its state by the last acceptance rate."""
    inner = Counting()
    shapes = AutoTree(AdaptiveTree()).candidates(row_width=16, buckets=False)
    policy = CostAware(shapes, POSITIONS, inner, self_drafted=False)
    used = run(policy, [0], 500, row_ms=0.5)
    assert len(used) == len(inner.observed) and used.count(PLAIN) > 400
    assert inner.asked == len(used) - used.count(PLAIN) == len(used) - inner.observed.count(0) > 0


@pytest.mark.parametrize(("ms", "kept"), [(1.0, WARM_UP + STAY * PERIOD), (20.0, WARM_UP)])
def test_a_chosen_tree_is_kept_unless_its_first_steps_are_slow(ms: float, kept: int) -> None:
    """The first steps accept less than later ones, so that their codes do not show what the tree commits.
    Their times show how long its steps take. Plain steps take 1 ms here, and the tree was never used."""
    policy = CostAware(CANDIDATES, POSITIONS)
    before = run(policy, [0], 60, row_ms=1.0)
    chain = policy._candidates[3]
    assert policy._current.shape == PLAIN and chain.shape not in before
    policy._scheduled.clear()
    policy._schedule_around(chain)
    used = []
    for _ in range(100):
        shapes = policy.shapes({0: 111})
        used.append(shapes[0])
        policy.observe({0: step(used[-1], 2 * used[-1].depth // 3, ms, 112)})
    assert [shape == chain.shape for shape in used].index(False) == kept


def trials_by_position(trial_part: float, monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Returns how many trials of trees four images in step begin in the second half of the images (true), and
    in the first (false), where rows are so dear that plain decoding is best."""
    monkeypatch.setattr(policy_module, "TRIAL_PART", trial_part)
    policy, begun = CostAware(CANDIDATES, POSITIONS), Counter[bool]()
    position, before = 0, PLAIN
    for _ in range(40000):
        shapes = policy.shapes(dict.fromkeys(range(4), position))
        shape = shapes[0]
        if shape.depth and not before.depth and policy._chosen:
            begun[position > POSITIONS / 2] += 1
        before = shape
        policy.observe({slot: step(shape, 0, 1.0 + shape.budget, position + 1) for slot in shapes})
        position = (position + 1) % (POSITIONS - 1)
        if not position:
            for slot in range(4):
                policy.reset(slot, 0)
    return begun


def test_a_batch_in_step_tries_no_tree_late_in_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images would still be out of step when the first of them ends."""
    with_rule = trials_by_position(TRIAL_PART, monkeypatch)
    assert with_rule[False] >= 3 and not with_rule[True]
    assert trials_by_position(1.0, monkeypatch)[True], "without the rule there would be late trials"


def test_a_batch_out_of_step_goes_back_to_plain_decoding_only_for_a_clear_gain() -> None:
    """Its images would have to wait, so plain decoding counts as worse by WAIT_LOSS."""
    policy = CostAware(CANDIDATES, POSITIONS)
    until_trial(policy, [0, 1, 2, 3], row_ms=0.1)
    plain, tree = policy._candidates[0], policy._candidates[3]
    hoped = {}
    for chosen in (plain, tree):
        for is_in_step in (True, False):
            policy._chosen, policy._are_equal = chosen, is_in_step
            hoped[chosen is plain, is_in_step] = policy._hoped_codes(plain)
    assert hoped[True, True] == hoped[True, False] == hoped[False, True]
    assert hoped[False, False] == pytest.approx(hoped[False, True] - WAIT_LOSS)
