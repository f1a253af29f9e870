"""The times of steps by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import pytest

from adt_tree.budget.times import PERIOD, StepTimes


def add(times: StepTimes, candidate: int, images: int, ms: float, *, in_use: bool) -> None:
    """Adds the time of a step in the middle of the images."""
    times.add(candidate, images, ms, progress=0.0, in_use=in_use)


def test_the_first_time_at_a_new_number_of_images_does_not_change_the_order() -> None:
    """The candidate in use takes 2 ms with two images. With one image in flight, its first step is a slow one
    of 9 ms, and all that follow take 1 ms. The other candidate then takes half its time as well."""
    times = StepTimes([1, 1])
    for candidate in (0, 1):
        add(times, candidate, 2, 2.0, in_use=False)
    for ms in [9.0] + [1.0] * PERIOD:
        add(times, 0, 1, ms, in_use=True)
    times.fit()
    assert times.of(0, 1) == 1.0 and times.of(1, 1) == pytest.approx(1.0)


def test_times_depend_on_the_number_of_images() -> None:
    """A step takes 2 ms and 0.5 ms a node. Two candidates were timed with 8 images in flight, and one of
    them with 2; the others follow from the line, in proportion to what was measured."""
    times = StepTimes([1, 4, 16])
    for candidate, images in ((0, 8), (1, 8), (0, 2)):
        add(times, candidate, images, 2 + 0.5 * images * (1, 4, 16)[candidate], in_use=False)
    times.fit()
    assert times.of(0, 2) == 3 and times.of(1, 2) == pytest.approx(6) and times.of(2, 1) == pytest.approx(10)
    assert times.is_timed(1) and not times.is_timed(2)


def test_a_slower_device_changes_the_times_of_all_numbers_of_images() -> None:
    times = StepTimes([1, 4])
    for images in (1, 4):
        add(times, 1, images, 10.0, in_use=False)
    for progress in (-0.5, 0.5) * 6:  # after this it is known that prefixes cost nothing
        times.add(0, 9, 100.0, progress, in_use=False)
    times.begin(0)
    for ms in [2.0] * PERIOD + [3.0] * PERIOD:
        add(times, 0, 4, ms, in_use=True)
    times.fit()
    assert [times.of(0, 4), times.of(1, 4), times.of(1, 1)] == pytest.approx([3.0, 15.0, 15.0])


def test_times_are_those_of_the_middle_of_the_images() -> None:
    """With 8 images in flight a step takes 8 ms at their beginning and 16 ms at their end. After two images a
    tree, which takes 10 ms more and twice as much for longer prefixes, is timed in the first tenth alone."""
    times = StepTimes([1, 4])
    for number in range(512):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 12 + 8 * progress, progress, in_use=True)
        assert number < 256 or times.of(0, 8) == pytest.approx(12, abs=0.2)
    for _ in range(PERIOD):
        times.add(1, 8, 22 + 16 * -0.45, -0.45, in_use=False)
    assert times.of(1, 8) == pytest.approx(22, abs=0.1)


def test_longer_prefixes_do_not_look_like_a_slower_device() -> None:
    """In the first image of a run plain steps take 6 ms at first and 10 ms at the end. A tree was timed at
    its beginning, where it is expected to take 4 ms less than in the middle."""
    times = StepTimes([1, 4])
    times.add(1, 8, 20.0, -0.5, in_use=False)
    for number in range(255):
        progress = number / 255 - 0.5
        times.add(0, 8, 8 + 4 * progress, progress, in_use=True)
    assert times.of(1, 8) == pytest.approx(24, abs=0.5)


def test_the_first_times_of_use_do_not_change_the_others() -> None:
    """The lower quartile of few times is the least of them, so it falls while they become more."""
    times = StepTimes([1, 4])
    for progress in (-0.5, 0.5) * 6:
        times.add(1, 9, 100.0, progress, in_use=False)
    add(times, 1, 4, 10.0, in_use=False)
    times.begin(0)
    for number in range(PERIOD):
        add(times, 0, 4, 3.0 - 0.1 * number, in_use=True)
    assert times.of(1, 4) == 10.0


def test_a_candidate_that_comes_into_use_forgets_all_its_times() -> None:
    """It had a trial with four images, and its next one began with three. Then it comes into use, and the
    device is slower."""
    times = StepTimes([1, 4])
    add(times, 1, 4, 10.0, in_use=False)
    times.begin_trial(1)
    times.begin(1)
    assert times.of(1, 4) == 10.0
    add(times, 1, 4, 20.0, in_use=True)
    assert times.of(1, 4) == 20.0


def test_one_very_long_step_does_not_spoil_the_times() -> None:
    """Plain steps of 8 images take 8 ms at first and 16 ms at the end. In the second image another program
    stops one of them for three seconds."""
    times = StepTimes([1, 4])
    for number in range(512):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 3000.0 if number == 300 else 12 + 8 * progress, progress, in_use=True)
        # It is among the times whose mean is taken, where it counts as twice as long as the others.
        error = 1.6 if 300 <= number < 300 + PERIOD else 0.5
        assert number < 256 or times.of(0, 8) == pytest.approx(12, abs=error)


def test_what_longer_prefixes_cost_is_learned_anew_when_it_changes() -> None:
    """A prefix costs nothing for eight images, and 8 ms from then on."""
    times = StepTimes([1, 4])
    for number in range(24 * 256):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 12 + 8 * progress * (number >= 8 * 256), progress, in_use=True)
    assert times.of(0, 8) == pytest.approx(12, abs=0.1)


def test_a_program_that_runs_now_and_then_slows_short_and_long_steps_alike() -> None:
    """It takes every third millisecond. So one of three plain steps takes 2 ms instead of 1, and every step
    of a tree 4 instead of 3."""
    times = StepTimes([1, 4])
    for ms in [1.0, 2.0, 1.0] * 3:
        add(times, 0, 1, ms, in_use=False)
        add(times, 1, 1, 4.0, in_use=False)
    assert times.of(1, 1) / times.of(0, 1) == pytest.approx(3, abs=0.1)
