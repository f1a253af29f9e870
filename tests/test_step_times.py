"""The times of steps by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

from itertools import count, islice

import pytest

from adt_tree.budget.times import PERIOD, StepTimes


def test_the_first_time_at_a_new_number_of_images_does_not_change_the_order() -> None:
    """The candidate in use takes 2 ms with two images. With one image in flight, its first step is a slow one
    of 9 ms, and all that follow take 1 ms. The other candidate then takes half its time as well."""
    times = StepTimes([1, 1])
    for candidate in (0, 1):
        times.add(candidate, 2, 2.0, in_use=False)
    times.fit()
    for ms in [9.0] + [1.0] * PERIOD:
        times.add(0, 1, ms, in_use=True)
    assert times.of(0, 1) == 1.0 and times.of(1, 1) == pytest.approx(1.0)


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
    for ms in [2.0] * PERIOD + [3.0] * PERIOD:
        times.add(0, 4, ms, in_use=True)
    times.fit()
    assert [times.of(0, 4), times.of(1, 4), times.of(1, 1)] == pytest.approx([3.0, 15.0, 15.0])


def test_a_trial_is_compared_with_steps_on_both_sides() -> None:
    """Every step takes 1 % longer than the one before, and one of the other candidate twice as long. The last
    of several trials is corrected, and those before it are not corrected again."""
    times = StepTimes([1, 4])
    steps = (1.01**number for number in count())
    for ms in islice(steps, PERIOD):
        times.add(0, 4, ms, in_use=True)
    for _ in range(4):
        before = times.of(0, 4)
        times.begin_trial(1)
        for ms in islice(steps, PERIOD):
            times.add(1, 4, 2 * ms, in_use=False)
        for ms in islice(steps, PERIOD):
            times.add(0, 4, ms, in_use=True)
        times.end_trial(1, 4, times.of(0, 4) / before)
        assert times.of(1, 4) / times.of(0, 4) == pytest.approx(2.0, rel=0.01)


def test_a_candidate_that_comes_into_use_forgets_all_its_times() -> None:
    """It had a trial with four images, and its next one began with three. Then it comes into use, and the
    device is slower."""
    times = StepTimes([1, 4])
    times.add(1, 4, 10.0, in_use=False)
    times.begin_trial(1)
    times.begin(1)
    assert times.of(1, 4) == 10.0
    times.add(1, 4, 20.0, in_use=True)
    assert times.of(1, 4) == 20.0
