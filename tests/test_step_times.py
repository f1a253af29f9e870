"""The times of steps by the number of images in flight, and the gain of trees over plain decoding in step."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import pytest

from adt_tree.budget.in_step import (
    EARLY_COST,
    EARLY_TRIALS,
    FREE_IMAGES,
    LATE_COST,
    LEAST_TRIALS,
    RECENT_STEPS,
    InStep,
)
from adt_tree.budget.times import RECENT, StepTimes
from adt_tree.records import Step

PLAIN_STEP = Step(0, 0, 0, depth=0, width=0, nodes=0, accepted=0, ms=1.0)
TREE_STEP = replace(PLAIN_STEP, depth=3, width=1, nodes=3, accepted=1)


def trial(in_step: InStep, gain: float, codes: float = 2) -> None:
    """Adds a trial between plain steps of 1 ms. Two images commit so many codes in its step, on average: a
    multiple of one half."""
    for _ in range(RECENT_STEPS):
        in_step.add(0, [PLAIN_STEP], 1.0)
    accepted = int(codes - 1), int(2 * (codes - 1)) - int(codes - 1)
    in_step.add(3, [replace(TREE_STEP, accepted=number) for number in accepted], codes / gain)
    for _ in range(RECENT_STEPS):
        in_step.add(0, [PLAIN_STEP], 1.0)
    in_step.judge()


def test_a_batch_that_begins_anew_is_in_step_again() -> None:
    """Four images draft after it has been seen that trees pay, and so does the next batch from its first step
    on. A larger batch decodes plainly until trials have shown the same."""
    in_step = InStep()
    in_step.begin(images=4)
    trial(in_step, gain=1.7)
    assert in_step.is_plain, "one trial is not enough"
    trial(in_step, gain=1.7)
    assert not in_step.is_plain
    for images, plain in ((4, False), (3, False), (8, True)):
        in_step.begin(images)
        assert in_step.is_plain == plain
    trial(in_step, gain=0.9)
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
    in_step.begin(images=4)
    for gain in (1.0, 1.0, 8.0, 1.2, 8.0, 1.0):
        trial(in_step, gain)
        assert in_step.is_plain


def test_early_trials_end_without_hope() -> None:
    """A tree that gains a fifth is tried EARLY_TRIALS times, one that loses a tenth LEAST_TRIALS times."""
    for gain, number in ((1.2, EARLY_TRIALS), (0.9, LEAST_TRIALS)):
        in_step = InStep()
        in_step.begin(images=4)
        for n in range(1, number + 1):
            trial(in_step, gain)
            assert in_step.is_plain and in_step.share() == (EARLY_COST if n < number else LATE_COST)


def test_poor_rows_do_not_end_hope() -> None:
    """By the growth law a step of a chain of 3 commits 2.08 codes. So two trials of 1.5 codes, which take as
    long as 1.5 plain steps, count as a gain of 1.13 rather than 1."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(LEAST_TRIALS):
        trial(in_step, gain=1.0, codes=1.5)
    assert in_step.share() == EARLY_COST


def test_a_trial_is_due_after_a_time_that_depends_on_the_last_one() -> None:
    """A trial of two counted steps, of 2 ms each, may follow plain steps of 4 / EARLY_COST = 13.3 ms. Each of
    its steps commits 3 codes, so that there is hope."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(RECENT_STEPS):
        assert not in_step.is_due(), "nothing to compare a trial with"
        in_step.add(0, [PLAIN_STEP], 1.0)
    assert in_step.is_due()
    for steps in ([], [replace(TREE_STEP, accepted=2)], [replace(TREE_STEP, accepted=2)]):
        in_step.add(3, steps, 2.0)
    for number in range(1, 25):
        in_step.add(0, [PLAIN_STEP], 1.0)
        in_step.judge()
        if number >= RECENT_STEPS:
            assert in_step.is_due() == (number * EARLY_COST >= 4), number


def test_the_first_time_at_a_new_number_of_images_does_not_change_the_order() -> None:
    """The candidate in use takes 2 ms with two images. With one image in flight, its first step is a slow one
    of 9 ms, and all that follow take 1 ms. The other candidate then takes half its time as well."""
    times = StepTimes([1, 1])
    for candidate in (0, 1):
        times.add(candidate, 2, 2.0, in_use=False)
    times.fit()
    for ms in [9.0] + [1.0] * RECENT:
        times.add(0, 1, ms, in_use=True)
    assert times.of(0, 1) == 1.0 and times.of(1, 1) == pytest.approx(1.0)


def test_a_gain_of_codes_is_that_of_all_trials() -> None:
    """Two of three trials gain 1.5, because their step commits 3 codes; the third commits 1."""
    in_step = InStep()
    in_step.begin(images=4)
    for codes in (3, 1, 3):
        trial(in_step, codes / 2, codes)
        assert in_step.is_plain


def test_times_depend_on_the_number_of_images() -> None:
    """A step takes 2 ms and 0.5 ms a node. Two candidates were timed with 8 images in flight, and one of
    them with 2; the others follow from the line, in proportion to what was measured."""
    times = StepTimes([1, 4, 16])
    for candidate, images in ((0, 8), (1, 8), (0, 2)):
        times.add(candidate, images, 2 + 0.5 * images * (1, 4, 16)[candidate], in_use=False)
    times.fit()
    assert times.of(0, 2) == 3 and times.of(1, 2) == pytest.approx(6) and times.of(2, 1) == pytest.approx(10)
    assert times.is_timed(1) and not times.is_timed(2)


def test_a_slower_device_changes_the_times_of_all_numbers_of_images() -> None:
    times = StepTimes([1, 4])
    for images in (1, 4):
        times.add(1, images, 10.0, in_use=False)
    times.begin(0)
    for ms in [2.0] * RECENT + [3.0] * RECENT:
        times.add(0, 4, ms, in_use=True)
    times.fit()
    assert [times.of(0, 4), times.of(1, 4), times.of(1, 1)] == pytest.approx([3.0, 15.0, 15.0])


def test_a_trial_is_compared_with_steps_on_both_sides() -> None:
    """Every step takes 1 % longer than the one before, and one of the other candidate twice as long. The last
    of several trials is corrected, and those before it are not corrected again."""
    times = StepTimes([1, 4])
    steps = (1.01**number for number in count())
    for ms in islice(steps, RECENT):
        times.add(0, 4, ms, in_use=True)
    for _ in range(4):
        before = times.of(0, 4)
        times.begin_trial(1)
        for ms in islice(steps, RECENT):
            times.add(1, 4, 2 * ms, in_use=False)
        for ms in islice(steps, RECENT):
            times.add(0, 4, ms, in_use=True)
        times.end_trial(1, 4, times.of(0, 4) / before)
        assert times.of(1, 4) / times.of(0, 4) == pytest.approx(2.0, rel=0.01)
