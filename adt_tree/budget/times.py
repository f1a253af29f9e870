"""The times of steps, by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

# Before anything is timed, a step is expected to take rows ** GROWTH times as long with so many times the
# rows. The exponent has a standard deviation of GROWTH_SPREAD. From one candidate to the next one the
# logarithm of the time may differ from that by SPREAD times the root of their distance, the logarithm of the
# ratio of their nodes. From one number of images to another the times of all candidates may differ from it by
# COMMON_SPREAD times the logarithm of the ratio, and the step from one candidate to the next by IMAGES_SPREAD
# times the root of that logarithm and of their distance.
GROWTH, GROWTH_SPREAD, SPREAD, COMMON_SPREAD, IMAGES_SPREAD = 0.5, 0.25, 0.25, 0.35, 0.15
LEAST_DISTANCE = 0.1  # of two candidates with equally many nodes, one of which is deeper
# From the beginning of an image to its end the logarithm of a time is expected to grow by PREFIX, with a
# standard deviation of PREFIX_SPREAD. Plain steps and those with trees have growths of their own, whose
# correlation is PREFIX_SHARED. From one number of images to another a growth may change by PREFIX_CHANGE
# times the logarithm of their ratio.
PREFIX, PREFIX_SPREAD, PREFIX_SHARED, PREFIX_CHANGE = 0.3, 0.3, 0.7, 0.15
# Variances of the logarithm of a time: of single steps; of the load of the device, which changes all times;
# and of any part of the state on its own, both by millisecond, for at most MOST_MS. A part whose variance is
# MOST_VARIANCE is not doubted any further.
STEP_VARIANCE, LOAD_VARIANCE, OWN_VARIANCE, MOST_MS, MOST_VARIANCE = 0.01, 1e-5, 1e-7, 1e4, 0.05
MOST_STEPS = 8  # most steps from one estimate to the next
LEAST_MS = 1e-3  # shorter times are beyond the resolution of a clock
# A time counts as a disturbed one, and only in part, beyond MOST_RATIO times the median of three or more
# equal steps around it, and beyond MOST_ERROR standard deviations of a single step from the estimate.
MOST_RATIO, MOST_ERROR = 3.0, 5.0

_Matrix = list[list[float]]


class _Estimates:
    """The logarithms of all candidates' step times with one number of images in flight: a Kalman filter.

    The state holds the logarithm of each candidate's time in the middle of the images, then what longer
    prefixes add to the logarithm from the beginning of an image to its end, for plain steps and for those
    with trees. A step of one candidate tells about the others as well: the load of the device changes all
    times by the same factor, and candidates of similar sizes take similar times.
    """

    def __init__(self, means: list[float], covariance: _Matrix, clock_ms: float) -> None:
        self.means, self.covariance, self.clock_ms = means, covariance, clock_ms

    def logarithm(self, candidate: int, progress: float) -> float:
        """Returns the expected logarithm of a step's time."""
        return self.means[candidate] + progress * self.means[self._prefix(candidate)]

    def _prefix(self, candidate: int) -> int:
        return len(self.means) - 1 if candidate else len(self.means) - 2

    def add(self, candidate: int, steps: int, ms: float, progress: float, clock_ms: float) -> None:
        """Adds the mean time of some steps, of which the last ended at clock_ms."""
        passed_ms, self.clock_ms = min(clock_ms - self.clock_ms, MOST_MS), clock_ms
        for row in self.covariance[:-2]:
            row[:-2] = [value + LOAD_VARIANCE * passed_ms for value in row[:-2]]
        for index, row in enumerate(self.covariance):
            if row[index] < MOST_VARIANCE:
                row[index] += OWN_VARIANCE * passed_ms
        prefix = self._prefix(candidate)
        shared = [row[candidate] + progress * row[prefix] for row in self.covariance]
        known = shared[candidate] + progress * shared[prefix]
        variance = known + STEP_VARIANCE / steps
        # While little is known, the error is that of the logarithm. Later it is the relative error, so that
        # the mean of times is estimated and not that of their logarithms, which favours short steps: a
        # program that runs now and then makes some of them much slower, and all long ones a little.
        doubt, ratio = known / variance, ms / math.exp(self.logarithm(candidate, progress))
        most = MOST_ERROR * math.sqrt(known + STEP_VARIANCE)
        error = max(-most, min(doubt * math.log(ratio) + (1 - doubt) * (ratio - 1), most))
        for index, row in enumerate(self.covariance):
            gain = shared[index] / variance
            self.means[index] += gain * error
            row[:] = [value - gain * other for value, other in zip(row, shared, strict=True)]


class StepTimes:
    """Estimates how long a step of each candidate takes with any number of images in flight.

    Attention reads longer prefixes from step to step, so a step at the end of an image takes longer than one
    at its beginning. What is estimated is the time of a step in the middle of the images. Otherwise a
    candidate that is timed near the end would look worse than one that is timed near the beginning: a plain
    step of 16 images takes 10 ms first and 15 ms last (docs/LOG.md).
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        """nodes: number of nodes of each candidate's trees, root included, in ascending order. The first
        candidate is plain decoding."""
        self._estimates: dict[int, _Estimates] = {}  # by images in flight
        # The steps since the last estimate: the candidate and the images of all, time and progress of each.
        self._kind, self._steps = (0, 0), list[tuple[float, float]]()
        self._clock_ms = 0.0  # sum of the added times, none for more than twice its estimate
        self._distance = [0.0]  # of each candidate from plain decoding
        for before, after in pairwise(nodes):
            self._distance.append(self._distance[-1] + max(math.log(after / before), LEAST_DISTANCE))

    def add(self, candidate: int, images: int, ms: float, progress: float) -> None:
        """Adds the time of a step. progress: share of an image that is decoded, less 1/2, as the mean of all
        images."""
        if self._kind != (candidate, images) or len(self._steps) == MOST_STEPS:
            self._estimate()
            self._kind = candidate, images
        self._steps.append((max(ms, LEAST_MS), progress))

    def _estimate(self) -> None:
        """Estimates the times anew from the steps that were added since the last estimate. It is called once
        for several steps, because it takes a hundredth of the time of a short one."""
        (candidate, images), steps, self._steps = self._kind, self._steps, []
        # Of two steps none can be seen to be the disturbed one, so each counts on its own.
        for part in [steps] if len(steps) > 2 else [[step] for step in steps]:
            most = MOST_RATIO * median(ms for ms, _ in part)
            ms, progress = fmean(min(ms, most) for ms, _ in part), fmean(progress for _, progress in part)
            # During one very long step the load need not have changed for so long.
            self._clock_ms += len(part) * min(ms, 2 * self.of(candidate, images))
            if images not in self._estimates:
                self._estimates[images] = self._first(candidate, images, ms)
            self._estimates[images].add(candidate, len(part), ms, progress, self._clock_ms)

    def bound(self, candidate: int, images: int, ms: float, progress: float) -> None:
        """Adds the time of a step that may have taken longer than usual. It counts if it is less than 0.9 of
        the estimate, so that noise alone seldom lowers that."""
        self._estimate()
        estimates = self._estimates.get(images)
        if estimates is not None and ms < 0.9 * math.exp(estimates.logarithm(candidate, progress)):
            self.add(candidate, images, ms, progress)

    def _first(self, candidate: int, images: int, ms: float) -> _Estimates:
        """Returns the estimates before the first step with so many images, which is one of `candidate`."""
        if not self._estimates:
            level = math.log(ms) - GROWTH * self._distance[candidate]
            means = [*(level + GROWTH * distance for distance in self._distance), PREFIX, PREFIX]
            covariance = self._covariance(1.0, GROWTH_SPREAD**2, SPREAD**2, PREFIX_SPREAD**2)
            return _Estimates(means, covariance, self._clock_ms)
        number = self._nearest(images)
        nearest, ratio = self._estimates[number], math.log(images / number)
        added = self._covariance(
            (COMMON_SPREAD * ratio) ** 2, 0.0, IMAGES_SPREAD**2 * abs(ratio), (PREFIX_CHANGE * ratio) ** 2
        )
        rows = zip(nearest.covariance, added, strict=True)
        covariance = [[a + b for a, b in zip(*pair, strict=True)] for pair in rows]
        means = [mean + GROWTH * ratio for mean in nearest.means[:-2]]
        return _Estimates(means + nearest.means[-2:], covariance, nearest.clock_ms)

    def _covariance(self, common: float, growth: float, step: float, prefix: float) -> _Matrix:
        """Returns the covariance of a state: that of a line through the candidates, whose level and slope
        have the variances `common` and `growth`, plus a random walk from one candidate to the next, whose
        variance is `step` by distance; and apart from it that of the prefixes, of variance `prefix`."""
        line = [[common + growth * a * b + step * min(a, b) for a in self._distance] for b in self._distance]
        zeros, both = [0.0] * len(line), PREFIX_SHARED * prefix
        return [*(row + [0.0, 0.0] for row in line), [*zeros, prefix, both], [*zeros, both, prefix]]

    def _nearest(self, images: int) -> int:
        """Returns the most similar number of images with which steps were timed."""
        if images in self._estimates:  # as in nearly all steps, which must not wait for a search
            return images
        return min(self._estimates, key=lambda number: abs(math.log(number / images)))

    def is_new(self, images: int) -> bool:
        """Returns whether no step was timed with more than half as many images in flight."""
        self._estimate()
        return all(2 * number <= images for number in self._estimates)

    def of(self, candidate: int, images: int) -> float:
        """Returns the time of a step; infinite before the first time of all."""
        if self._steps:
            self._estimate()
        if not self._estimates:
            return math.inf
        nearest = self._nearest(images)
        return math.exp(self._estimates[nearest].means[candidate] + GROWTH * math.log(images / nearest))
