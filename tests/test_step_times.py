"""The times of steps by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import math

import pytest

from adt_tree.budget.policy import PERIOD
from adt_tree.budget.times import StepTimes


def add(times: StepTimes, candidate: int, images: int, ms: float, steps: int = 1) -> None:
    """Adds the times of steps in the middle of the images."""
    for _ in range(steps):
        times.add(candidate, images, ms, progress=0.0)


def test_nothing_is_known_before_the_first_time() -> None:
    times = StepTimes([1, 4])
    times.bound(0, 2, 1.0, progress=0.0)
    assert math.isinf(times.of(1, 2)) and times.is_new(1)


def test_a_slow_first_step_with_another_number_of_images_does_not_change_the_order() -> None:
    """Both candidates take 2 ms with two images. With one image in flight, the first step of one of them is a
    slow one of 9 ms, and all that follow take 1 ms. The other one then takes half its time as well."""
    times = StepTimes([1, 2])
    for candidate in (0, 1):
        add(times, candidate, 2, 2.0, PERIOD)
    add(times, 0, 1, 9.0)
    add(times, 0, 1, 1.0, 6 * PERIOD)
    assert times.of(0, 1) == pytest.approx(1.0, rel=0.1)
    assert times.of(1, 1) == pytest.approx(times.of(0, 1), rel=0.1)


def test_times_depend_on_the_number_of_images() -> None:
    """A step takes 2 ms and 0.5 ms a node. Two candidates were timed with 8 images in flight, and one of
    them with 2. The times of the other one follow."""
    times = StepTimes([1, 4])
    for candidate, images in ((0, 8), (1, 8), (0, 2)):
        add(times, candidate, images, 2 + 0.5 * images * (1, 4)[candidate], 2 * PERIOD)
    assert times.of(0, 8) == pytest.approx(6, rel=0.02) and times.of(1, 8) == pytest.approx(18, rel=0.02)
    assert times.of(0, 2) == pytest.approx(3, rel=0.02) and 6 < times.of(1, 2) < 10
    assert times.is_new(16) and not times.is_new(15)


def test_a_candidate_that_was_not_timed_lies_between_its_neighbours() -> None:
    """The candidates take 4 and 16 ms. The other one lies between them and, when the device becomes
    slower, follows."""
    times = StepTimes([1, 4, 16])
    add(times, 0, 1, 4.0, PERIOD)
    add(times, 2, 1, 16.0, PERIOD)
    assert times.of(1, 1) == pytest.approx(8, rel=0.1)
    for step in range(50 * PERIOD):
        add(times, 0, 1, 4.0 * 2 ** (step / (50 * PERIOD)))
    assert times.of(1, 1) == pytest.approx(16, rel=0.1)


def test_a_slower_device_changes_all_times() -> None:
    times = StepTimes([1, 4])
    add(times, 1, 4, 10.0, 2 * PERIOD)
    for ms, tree_ms in ((2.0, 10.0), (3.0, 15.0)):
        add(times, 0, 4, ms, 25 * PERIOD)
        assert times.of(0, 4) == pytest.approx(ms, rel=0.01)
        assert times.of(1, 4) == pytest.approx(tree_ms, rel=0.07)


def test_times_are_those_of_the_middle_of_the_images() -> None:
    """With 8 images in flight a step takes 8 ms at their beginning and 16 ms at their end. After two images a
    tree, which takes 10 ms more and twice as much for longer prefixes, is timed in the first tenth alone."""
    times = StepTimes([1, 4])
    for number in range(512):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 12 + 8 * progress, progress)
        assert number < 256 or times.of(0, 8) == pytest.approx(12, rel=0.08)
    for _ in range(PERIOD):
        times.add(1, 8, 22 + 16 * -0.45, -0.45)
    assert times.of(1, 8) == pytest.approx(22, rel=0.15)


def test_longer_prefixes_do_not_look_like_a_slower_device() -> None:
    """Plain steps take 6 ms at the beginning of the images and 10 ms at their end. A tree was timed at the
    beginning of the first one, where it is expected to take 4 ms less than in the middle."""
    times = StepTimes([1, 4])
    times.add(1, 8, 20.0, -0.5)
    for number in range(4 * 256):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 8 + 4 * progress, progress)
    assert times.of(1, 8) == pytest.approx(24, rel=0.1)


def test_one_very_long_step_does_not_spoil_the_times() -> None:
    """Plain steps of 8 images take 8 ms at first and 16 ms at the end. In the second image another program
    stops one of them for three seconds."""
    times = StepTimes([1, 4])
    for number in range(512):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 3000.0 if number == 300 else 12 + 8 * progress, progress)
        assert number < 256 or times.of(0, 8) == pytest.approx(12, rel=0.3 if number >= 300 else 0.08)
    assert times.of(0, 8) == pytest.approx(12, rel=0.08)


def test_steps_that_are_added_together_count_as_if_each_were_estimated() -> None:
    """Times and their uncertainty come out alike, whether nobody asks in between or after every step."""
    together, singly = StepTimes([1, 4]), StepTimes([1, 4])
    for ms in (8.0, 9.0, 7.0, 10.0) * 4:
        add(together, 0, 1, ms)
        add(singly, 0, 1, ms)
        singly.of(0, 1)
    for candidate in (0, 1):
        assert together.of(candidate, 1) == pytest.approx(singly.of(candidate, 1), rel=0.03)
    variances = [times._estimates[1].covariance[0][0] for times in (together, singly)]
    assert variances[0] == pytest.approx(variances[1], rel=0.3)


def test_a_long_step_among_others_counts_as_three_of_them() -> None:
    """The time is unknown before, so that only the other steps show which one is disturbed."""
    times = StepTimes([1, 4])
    for ms in (8.0, 8.0, 800.0, 8.0, 8.0, 8.0, 8.0, 8.0):
        add(times, 0, 1, ms)
    assert times.of(0, 1) == pytest.approx((7 * 8 + 24) / 8, rel=0.02)


def test_what_longer_prefixes_cost_is_learned_anew_when_it_changes() -> None:
    """A prefix costs nothing for eight images. From then on the logarithm of a time grows by 0.6."""
    times = StepTimes([1, 4])
    for number in range(24 * 256):
        progress = number % 256 / 256 - 0.5
        times.add(0, 8, 12 * math.exp(0.6 * progress * (number >= 8 * 256)), progress)
    assert times.of(0, 8) == pytest.approx(12, rel=0.02)


def test_a_program_that_runs_now_and_then_slows_short_and_long_steps_alike() -> None:
    """It takes every third millisecond. So one of three plain steps takes 2 ms instead of 1, and every step
    of a tree 4 instead of 3."""
    times = StepTimes([1, 4])
    for ms in [1.0, 2.0, 1.0] * 10:
        add(times, 0, 1, ms)
        add(times, 1, 1, 4.0)
    assert times.of(1, 1) / times.of(0, 1) == pytest.approx(3, rel=0.05)


def test_a_time_that_may_be_too_long_counts_only_if_it_is_short() -> None:
    times = StepTimes([1, 4])
    add(times, 0, 4, 10.0, PERIOD)
    for ms in (20.0, 9.5):
        times.bound(0, 4, ms, progress=0.0)
        assert times.of(0, 4) == pytest.approx(10.0)
    times.bound(0, 4, 8.0, progress=0.0)
    assert times.of(0, 4) < 9.9


def test_a_candidate_that_was_not_timed_for_long_is_still_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is forgotten so fast that 200 steps are as long as some hours. Then the first step of the
    tree takes ten times as long as usual, and the next ones take as long as before."""
    monkeypatch.setattr("adt_tree.budget.times.OWN_VARIANCE", 1e-3)
    times = StepTimes([1, 4])
    add(times, 0, 1, 5.0, PERIOD)
    add(times, 1, 1, 10.0, PERIOD)
    add(times, 0, 1, 5.0, 200)
    add(times, 1, 1, 100.0)
    assert 10 < times.of(1, 1) < 50  # the one long step of 100 ms is not believed
    add(times, 1, 1, 10.0, PERIOD)
    assert times.of(1, 1) == pytest.approx(10, rel=0.1)
