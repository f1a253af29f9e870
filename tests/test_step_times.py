"""The times of steps by the number of images in flight, and the gain of trees over plain decoding in step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adt_tree.budget.in_step import EARLY_COST, LATE_COST, RECENT_STEPS, InStep
from adt_tree.budget.times import RECENT, StepTimes
from adt_tree.records import Step

PLAIN_STEP = Step(0, 0, 0, depth=0, width=0, nodes=0, accepted=0, ms=1.0)


def trial(in_step: InStep, gain: float, codes: int = 2) -> None:
    """Adds a trial between plain steps of 1 ms. Its step commits so many codes."""
    for _ in range(RECENT_STEPS):
        in_step.add([PLAIN_STEP], 1.0)
    in_step.add([replace(PLAIN_STEP, depth=3, width=1, nodes=3, accepted=codes - 1)], codes / gain)
    for _ in range(RECENT_STEPS):
        in_step.add([PLAIN_STEP], 1.0)
    in_step.judge()


def test_a_batch_that_begins_anew_is_in_step_again() -> None:
    """Four images draft after it has been seen that trees pay, and so does the next batch from its first step
    on. A larger batch decodes plainly until trials have shown the same."""
    in_step = InStep()
    in_step.begin(images=4)
    for _ in range(2):
        trial(in_step, gain=1.7)
        assert in_step.is_plain, "it takes more trials"
    trial(in_step, gain=1.7)
    assert not in_step.is_plain
    for images, plain in ((4, False), (3, False), (8, True)):
        in_step.begin(images)
        assert in_step.is_plain == plain
    trial(in_step, gain=0.9)
    in_step.update(images=2)
    assert not in_step.is_plain, "two images need not stay in step"


@pytest.mark.parametrize(("images", "plain"), [(1, False), (2, False), (3, True)])
def test_two_images_need_no_trials(images: int, plain: bool) -> None:
    in_step = InStep()
    in_step.begin(images)
    assert in_step.is_plain == plain


def test_slow_moments_do_not_end_plain_decoding() -> None:
    """What counts of the speeds is the median: here the gain is 1, while the mean of the gains is 3.6."""
    in_step = InStep()
    in_step.begin(images=4)
    for gain in (0.9, 1.0, 9.0, 1.0, 9.0, 0.9):
        trial(in_step, gain)
        assert in_step.is_plain


def test_all_rows_count() -> None:
    """Trees would commit one code in two rows and four in a third. The mean of 2 codes, in the time of 1.5
    plain steps, is a gain of 1.33."""
    in_step = InStep()
    in_step.begin(images=4)
    for codes in (1, 1, 4):
        assert in_step.is_plain
        trial(in_step, gain=codes / 1.5, codes=codes)
    assert not in_step.is_plain


@pytest.mark.parametrize(
    ("gains", "cost"),
    [
        ([0.5, 0.5], EARLY_COST),
        ([0.5, 1.0, 2.0], LATE_COST),
        ([0.5, 1.1, 2.0], EARLY_COST),
        ([1.1] * 7, EARLY_COST),
        ([1.1] * 8, LATE_COST),
    ],
)
def test_trials_become_rare_when_there_is_little_hope(gains: list[float], cost: float) -> None:
    in_step = InStep()
    in_step.begin(images=4)
    for gain in gains:
        trial(in_step, gain)
    assert in_step.is_plain and in_step.share() == cost


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
