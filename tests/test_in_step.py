"""Whether a batch whose images began together decodes plainly: the gain of trees over plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adt_tree.budget.in_step import (
    EARLY_COST,
    EARLY_TRIALS,
    FREE_IMAGES,
    LATE_COST,
    LEAST_TRIALS,
    InStep,
)
from adt_tree.budget.policy import EXPLORE_DEPTH, PROBE_STEPS, WARM_UP, CostAware
from adt_tree.budget.times import PERIOD
from adt_tree.policy import PLAIN, TreeShape
from adt_tree.records import Step
from tests.test_budget import CANDIDATES, step

PLAIN_STEP = Step(0, 0, 0, depth=0, width=0, nodes=0, accepted=0, ms=1.0)
TREE_STEP = replace(PLAIN_STEP, depth=3, width=1, nodes=3, accepted=1)
TRIAL = [EXPLORE_DEPTH] * (WARM_UP + PERIOD) + [7] * PROBE_STEPS + [15] * PROBE_STEPS  # levels, by step
MOST_OF_TRIAL = sum(depth + 1 for depth in TRIAL)  # codes of an image in a trial
IN_TRIAL = PERIOD + len(TRIAL)  # steps from the beginning of a batch to the end of its first trial


def trial(in_step: InStep, gain: float, codes: float = 2) -> None:
    """Adds a trial between plain steps of 1 ms. Two images commit so many codes in its step, on average: a
    multiple of one half."""
    for _ in range(PERIOD):
        in_step.add(0, [PLAIN_STEP], 1.0)
    accepted = int(codes - 1), int(2 * (codes - 1)) - int(codes - 1)
    in_step.add(3, [replace(TREE_STEP, accepted=number) for number in accepted], codes / gain)
    for _ in range(PERIOD):
        in_step.add(0, [PLAIN_STEP], 1.0)
    in_step.judge()


def test_a_batch_that_begins_anew_is_in_step_again() -> None:
    """Four images draft after it has been seen that trees pay, and so does the next batch from its first step
    on. A larger batch decodes plainly until trials have shown the same."""
    in_step = InStep()
    in_step.begin(images=4)
    trial(in_step, gain=1.4)
    assert in_step.is_plain, "one trial is not enough"
    trial(in_step, gain=1.4)
    assert not in_step.is_plain
    for images, plain in ((4, False), (3, False), (8, True)):
        in_step.begin(images)
        assert in_step.is_plain == plain
    trial(in_step, gain=0.9)
    assert in_step.is_plain
    in_step.update(images=2)
    assert not in_step.is_plain, "two images need not stay in step"


def test_few_images_draft_at_once() -> None:
    in_step = InStep()
    in_step.begin(images=FREE_IMAGES)
    assert not in_step.is_plain


def test_slow_moments_do_not_end_plain_decoding() -> None:
    """In two slow moments plain steps take so long that a trial seems to gain eight times its codes per
    second. The mean of the gains is 3.4, but the median of the speeds is 0.55, and a step commits 2 codes."""
    in_step = InStep()
    in_step.begin(images=16)
    for gain in (1.0, 1.0, 8.0, 1.2, 8.0, 1.0):
        trial(in_step, gain)
        assert in_step.is_plain


def test_early_trials_end_without_hope() -> None:
    """Sixteen images must gain 1.24. A tree that gains a fifth is tried EARLY_TRIALS times, one that loses a
    tenth LEAST_TRIALS times."""
    for gain, number in ((1.2, EARLY_TRIALS), (0.9, LEAST_TRIALS)):
        in_step = InStep()
        in_step.begin(images=16)
        for n in range(1, number + 1):
            trial(in_step, gain)
            assert in_step.is_plain and in_step.cost() == (EARLY_COST if n < number else LATE_COST)


def test_hope_depends_on_the_images() -> None:
    """Two trials gain 1.0, or 1.01 with the codes of the law. Four images have hope from 0.95 on, sixteen
    from 1.12 on."""
    for images, share in ((4, EARLY_COST), (16, LATE_COST)):
        in_step = InStep()
        in_step.begin(images)
        for _ in range(LEAST_TRIALS):
            trial(in_step, gain=1.0)
        assert in_step.cost() == share


def test_poor_rows_do_not_end_hope() -> None:
    """By the growth law a step of a chain of 3 commits 2.08 codes. So two trials of 1.5 codes, which take as
    long as 1.5 plain steps, count as a gain of 1.13 rather than 1. Sixteen images have hope from 1.12 on."""
    in_step = InStep()
    in_step.begin(images=16)
    for _ in range(LEAST_TRIALS):
        trial(in_step, gain=1.0, codes=1.5)
    assert in_step.cost() == EARLY_COST


@pytest.mark.parametrize(("large_ms", "pays"), [(3.1, True), (3.4, False)])
def test_a_larger_tree_may_pay(large_ms: float, pays: bool) -> None:
    """A step of 3 levels commits 2 codes in 2 plain steps' time, which is no gain. One of 15 levels commits
    1 + 5 ** EXPONENT = 4.1 codes by the law. Four images must gain 1.25 in two trials: 4.1 / 3.1 is 1.32."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(2):
        for _ in range(PERIOD):
            in_step.add(0, [PLAIN_STEP], 1.0)
        in_step.add(3, [TREE_STEP], 2.0)
        in_step.add(15, [], 9.0, timed=False)
        in_step.add(15, [], large_ms)
        for _ in range(PERIOD):
            in_step.add(0, [PLAIN_STEP], 1.0)
        in_step.judge()
    assert in_step.is_plain != pays


def test_a_trial_is_due_after_a_time_that_depends_on_the_last_one() -> None:
    """After a trial of three steps of 8 ms plain steps of 24 / EARLY_COST ms precede the next one. Each step
    commits 9 codes, so that there is hope."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(PERIOD):
        assert not in_step.is_due(), "nothing to compare a trial with"
        in_step.add(0, [PLAIN_STEP], 1.0)
    assert in_step.is_due()
    for steps in ([], [replace(TREE_STEP, accepted=8)], [replace(TREE_STEP, accepted=8)]):
        in_step.add(3, steps, 8.0)
    for number in range(1, 25):
        in_step.add(0, [PLAIN_STEP], 1.0)
        in_step.judge()
        if number >= PERIOD:
            assert in_step.is_due() == (number * EARLY_COST >= 24), number


def test_a_gain_of_codes_is_that_of_all_trials() -> None:
    """Two of three trials gain 1.4, because their step commits 3 codes; the third commits 1."""
    in_step = InStep()
    in_step.begin(images=4)
    for codes in (3, 1, 3):
        trial(in_step, codes / 2.2, codes)
        assert in_step.is_plain


def test_more_images_must_gain_more() -> None:
    """A gain of 1.15 is enough for eight images, but neither for sixteen nor with a drafter network."""
    for images, self_drafted, pays in ((8, True, True), (16, True, False), (8, False, False)):
        in_step = InStep(self_drafted)
        in_step.begin(images)
        for _ in range(EARLY_TRIALS):
            trial(in_step, gain=1.15)
        assert in_step.trees_pay() == pays


def test_a_trial_without_enough_plain_steps_after_it_is_not_judged() -> None:
    """The plain steps before it are enough in number. After one more an image ends."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(2 * PERIOD):
        in_step.add(0, [PLAIN_STEP], 1.0)
    in_step.add(3, [replace(TREE_STEP, accepted=3)], 1.0)
    assert not in_step.judge()
    in_step.add(0, [PLAIN_STEP], 1.0)
    in_step.update(images=3)
    assert not in_step.judge() and not any(in_step._trials.values())


@pytest.mark.parametrize("counted", [True, False])
def test_trials_that_are_cut_cost_time_too(counted: bool) -> None:
    """After a trial of 32 ms plain steps of 32 / EARLY_COST ms precede the next one. Here an image ends and
    another one begins while the trees still warm up, or later, so that the trial tells nothing."""
    in_step = InStep()
    in_step.begin(images=4)
    for number in range(PERIOD, 3 * PERIOD):
        if number == 2 * PERIOD:
            assert in_step.is_due()
            in_step.add(3, [TREE_STEP] if counted else [], 32.0)
            for images in (3, 4):
                in_step.update(images)
        in_step.add(0, [PLAIN_STEP], 1.0)
    assert not in_step.is_due()


def test_trials_that_are_cut_are_early_trials_too() -> None:
    """An image ends before a step of theirs counts."""
    in_step = InStep()
    for _ in range(2 * EARLY_TRIALS):
        in_step.update(images=4)
        assert in_step.cost() == EARLY_COST
        in_step.add(0, [PLAIN_STEP], 1.0)
        in_step.add(3, [], 1.0)
        in_step.update(images=3)
    in_step.update(images=4)
    assert in_step.cost() == LATE_COST


def test_a_change_of_images_comes_before_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four images that decode plainly, one ends after the first plain step that follows a trial."""
    policy, judged = CostAware(CANDIDATES), list[bool]()

    def judge(in_step: InStep) -> bool:
        judged.append(bool(in_step._tree_ms))
        return False

    monkeypatch.setattr(InStep, "judge", judge)
    left, after = 4, 0
    for position in range(100):
        shapes = policy.shapes(dict.fromkeys(range(left), position))
        policy.observe({slot: step(shape, 0, 1.0) for slot, shape in shapes.items()})
        after = after + 1 if after or shapes[0].depth else 0
        if after == len(TRIAL) + 1:
            left, judged[:] = 3, []
        if left == 3 and judged:
            break
    assert judged == [False]


def test_first_trials_follow_a_batch_that_ends_in_a_trial() -> None:
    """Three images decode plainly, and all end in the trial of a small tree. The next batch has one image,
    for which plain decoding is timed first."""
    policy = CostAware(CANDIDATES)

    def shape_of_next(images: int, position: int) -> TreeShape:
        shapes = policy.shapes(dict.fromkeys(range(images), position))
        policy.observe({slot: step(shape, 0, 1.0) for slot, shape in shapes.items()})
        return shapes[0]

    shapes = [shape_of_next(3, position) for position in range(PERIOD + 2)]
    assert shapes == [PLAIN] * PERIOD + [TreeShape(EXPLORE_DEPTH, 1, EXPLORE_DEPTH)] * 2
    assert [shape_of_next(1, position) for position in range(PERIOD)] == [PLAIN] * PERIOD


def run(policy: CostAware, roots: dict[int, int], steps: int) -> list[dict[int, TreeShape]]:
    """Returns the shapes of steps that take 1 ms. The first image accepts all drafts, the others one."""
    used = []
    for _ in range(steps):
        shapes = dict(policy.shapes(roots))
        used.append(shapes)
        accepted = {slot: shape.depth if slot == 0 else min(1, shape.depth) for slot, shape in shapes.items()}
        policy.observe({slot: step(shapes[slot], number, 1.0) for slot, number in accepted.items()})
        for slot, number in accepted.items():
            roots[slot] += number + 1
    return used


def test_images_ahead_wait_after_a_trial() -> None:
    """In a trial of 18 steps the first of three images commits 104 codes, the others 36. In the next 68 steps
    it waits. A step for all follows, and as many plain steps as a trial is compared with."""
    policy, roots = CostAware(CANDIDATES), dict.fromkeys(range(3), 0)
    before = run(policy, roots, IN_TRIAL)
    assert [shapes[0].depth for shapes in before] == [0] * PERIOD + TRIAL and roots[0] - roots[1] == 68
    assert run(policy, roots, 68) == [{1: PLAIN, 2: PLAIN}] * 68
    assert len({*roots.values()}) == 1
    assert run(policy, roots, 1 + PERIOD) == [dict.fromkeys(range(3), PLAIN)] * (1 + PERIOD)


def test_no_image_waits_where_idle_slots_cost() -> None:
    policy, roots = CostAware(CANDIDATES, idle_slots_cost=True), dict.fromkeys(range(3), 0)
    assert all(len(shapes) == 3 for shapes in run(policy, roots, 200))


def test_no_image_waits_for_a_new_one() -> None:
    """A client leaves after a trial, and the next image takes the slot."""
    for new_image in (False, True):
        policy, roots = CostAware(CANDIDATES), dict.fromkeys(range(3), 0)
        run(policy, roots, IN_TRIAL)
        if new_image:
            policy.reset(2, seed=1)
            roots[2] = 0
        assert len(policy.shapes(roots)) == (3 if new_image else 2)


def test_no_image_waits_after_a_trial_out_of_step() -> None:
    policy, roots = CostAware(CANDIDATES), dict.fromkeys(range(3), 0)
    run(policy, roots, 1)
    roots[2] = 90
    used = run(policy, roots, IN_TRIAL - 1 + PERIOD)
    assert all(len(shapes) == 3 for shapes in used)
    assert roots[0] - roots[1] == 68, "there was a trial"


def test_images_that_are_too_short_for_a_trial_do_not_wait() -> None:
    for positions, images in ((2 * PERIOD + MOST_OF_TRIAL + 1, 3), (2 * PERIOD + MOST_OF_TRIAL + 2, 2)):
        policy, roots = CostAware(CANDIDATES, positions=positions), dict.fromkeys(range(3), 0)
        used = run(policy, roots, IN_TRIAL)
        assert used[-1][0] != PLAIN and len(policy.shapes(roots)) == images


def test_two_images_do_not_wait() -> None:
    policy, roots = CostAware(CANDIDATES), dict.fromkeys(range(3), 0)
    run(policy, roots, IN_TRIAL)
    del roots[2]
    assert set(policy.shapes(roots)) == {0, 1}


@pytest.mark.parametrize(
    ("room", "idle_slots_cost", "tried"),
    [
        (MOST_OF_TRIAL + PERIOD, False, True),
        (MOST_OF_TRIAL + PERIOD - 1, False, False),
        (MOST_OF_TRIAL, True, True),
    ],
)
def test_a_trial_ends_no_image(room: int, idle_slots_cost: bool, tried: bool) -> None:
    """An image that ended in a trial would leave its slot to one that begins while the others go on. So the
    codes that a trial may commit, and PERIOD more, must fit between the root and the last code of the
    image."""
    policy = CostAware(CANDIDATES, idle_slots_cost=idle_slots_cost, positions=200)
    run(policy, dict.fromkeys(range(3), 0), PERIOD)
    used = policy.shapes(dict.fromkeys(range(3), 200 - 2 - room))
    assert (used[0] != PLAIN) == tried


def test_a_step_for_all_images_precedes_trees() -> None:
    """While an image waits, another one leaves. Two images may draft at once, since all trees have been tried
    before, but a drafter needs a step first in which both commit a code."""
    policy = CostAware(CANDIDATES)
    run(policy, dict.fromkeys(range(2), 0), 300)
    roots = dict.fromkeys(range(3), 0)
    run(policy, roots, IN_TRIAL)
    assert set(run(policy, roots, 1)[0]) == {1, 2}
    del roots[2]
    first, second = run(policy, roots, 2)
    assert first == {0: PLAIN, 1: PLAIN} and second[0] != PLAIN
