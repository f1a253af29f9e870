"""The times of steps by the number of images in flight, and the gain of trees over plain decoding in step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adt_tree.budget.in_step import EARLY_COST, LATE_COST, RECENT_STEPS, InStep
from adt_tree.budget.times import RECENT, StepTimes
from adt_tree.records import Step

PLAIN_STEP = Step(0, 0, 0, depth=0, width=0, nodes=0, accepted=0, ms=1.0)
TREE_STEP = replace(PLAIN_STEP, depth=3, width=1, nodes=3, accepted=1)


def trial(in_step: InStep, gain: float) -> None:
    """Adds a trial between plain steps of 1 ms. Its step commits two codes."""
    for _ in range(RECENT_STEPS):
        in_step.add([PLAIN_STEP], 1.0)
    in_step.add([TREE_STEP], 2.0 / gain)
    for _ in range(RECENT_STEPS):
        in_step.add([PLAIN_STEP], 1.0)
    in_step.judge()


def test_a_batch_that_begins_anew_is_in_step_again() -> None:
    """Two images draft after it has been seen that trees pay, and so does the next batch from its first step
    on. A larger batch decodes plainly until trials have shown the same."""
    in_step = InStep()
    in_step.begin(images=2)
    trial(in_step, gain=1.7)
    assert in_step.is_plain, "one trial is not enough"
    trial(in_step, gain=1.7)
    assert not in_step.is_plain
    for images, plain in ((2, False), (1, False), (8, True)):
        in_step.begin(images)
        assert in_step.is_plain == plain
    trial(in_step, gain=0.9)
    in_step.update(images=1)
    assert not in_step.is_plain, "a single image need not stay in step"


def test_one_row_or_one_moment_does_not_end_plain_decoding() -> None:
    """What counts is the median: here it is 1, while the mean is 3.6."""
    in_step = InStep()
    in_step.begin(images=4)
    for gain in (0.9, 1.0, 9.0, 1.0, 9.0, 0.9):
        trial(in_step, gain)
        assert in_step.is_plain
    assert in_step.share() == EARLY_COST
    for gain in (0.8, 0.8):
        trial(in_step, gain)
    assert in_step.is_plain and in_step.share() == LATE_COST


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
