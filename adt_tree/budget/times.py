"""The times of steps, by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# Steps from one decision to the next, and counted steps of a trial.
PERIOD = 8
# What the first steps of a run say about the cost of longer prefixes is mostly noise. So it counts as if 64
# steps, evenly spread over a quarter of an image, had been timed before: their sum of squared distances from
# the mean is this. All had taken equally long, or as the other kind of steps says: longer prefixes cost trees
# about TREES_PER_PLAIN times as much as plain steps (one to four times, docs/LOG.md).
SEEN_BEFORE, TREES_PER_PLAIN = 1 / 3, 2.0
FORGETTING = 0.999  # factor by which every point of such a line makes those before it count less
# Before anything is timed, a step is expected to take rows ** GROWTH times as long with so many times the
# rows. From one candidate to the next one the logarithm of its time may differ from that by SPREAD times the
# root of the logarithm of the ratio of their nodes. The same holds from one number of images to another,
# where the common part may differ by COMMON_SPREAD times the logarithm of their ratio, and that of each
# candidate by IMAGES_SPREAD.
GROWTH, SPREAD, COMMON_SPREAD, IMAGES_SPREAD = 0.5, 0.35, 0.35, 0.15
LEAST_DISTANCE = 0.1  # of two candidates with equally many nodes, one of which is deeper
# Variances of the logarithm of a time: of single steps; of the load of the device, which changes all times;
# and of the time of a candidate on its own, both by millisecond, for at most MOST_MS.
STEP_VARIANCE, LOAD_VARIANCE, OWN_VARIANCE, MOST_MS = 0.01, 1e-5, 1e-7, 1e4
MOST_ERROR = 3.0  # standard deviations by which a time may differ before it counts as a disturbed one


class _Slope:
    """The slope b of y = a + b * x by least squares over stretches of points, each of which has its own a. It
    is at least 0."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        self.begin()

    def value(self, expected: float = 0.0) -> float:
        """expected: the slope of the points that count as seen before."""
        return max((self._xy + SEEN_BEFORE * expected) / (self._xx + SEEN_BEFORE), 0.0)

    def begin(self) -> None:
        """Begins a stretch."""
        self._number, self._mean_x, self._mean_y = 0, 0.0, 0.0

    def add(self, x: float, y: float) -> None:
        """Adds a point. The points before it count a little less."""
        self._xx *= FORGETTING
        self._xy *= FORGETTING
        self._number += 1
        before = x - self._mean_x
        self._mean_x += before / self._number
        self._mean_y += (y - self._mean_y) / self._number
        self._xx += before * (x - self._mean_x)
        self._xy += before * (y - self._mean_y)


class _Estimates:
    """Logarithms of the times of all candidates' steps with one number of images in flight: a Kalman filter.

    A step of one candidate tells about the others as well: the load of the device changes all times by the
    same factor, and candidates of similar sizes take similar times.
    """

    def __init__(self, means: list[float], covariance: list[list[float]], clock_ms: float) -> None:
        self.means, self.covariance, self._clock_ms = means, covariance, clock_ms

    def add(self, candidate: int, ms: float, clock_ms: float) -> None:
        """Adds the time of a step that ended at clock_ms."""
        passed_ms, self._clock_ms = min(clock_ms - self._clock_ms, MOST_MS), clock_ms
        for index, row in enumerate(self.covariance):
            row[:] = [value + LOAD_VARIANCE * passed_ms for value in row]
            row[index] += OWN_VARIANCE * passed_ms
        shared = self.covariance[candidate][:]
        variance = shared[candidate] + STEP_VARIANCE
        # The relative error, so that the mean of times is estimated and not that of their logarithms, which
        # favours short steps: a program that runs now and then makes some of them much slower, and all long
        # ones a little.
        most = MOST_ERROR * math.sqrt(variance)
        error = max(-most, min(ms / math.exp(self.means[candidate]) - 1, most))
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
        """nodes: number of nodes of each candidate's trees, root included, in ascending order."""
        self._nodes = nodes
        self._estimates: dict[int, _Estimates] = {}  # by images in flight
        self._clock_ms = 0.0  # sum of all times
        self._last = (-1, 0)  # candidate and images in flight of the last time
        # Time that the prefix of one image takes if it is whole, for plain decoding and for trees.
        self._per_image = _Slope(), _Slope()
        # Expected logarithm of a candidate's time over that of plain decoding, and its variance.
        self._growth = [GROWTH * math.log(number / nodes[0]) for number in nodes]
        self._distance = [0.0]
        for before, after in pairwise(nodes):
            self._distance.append(self._distance[-1] + max(math.log(after / before), LEAST_DISTANCE))

    def add(self, candidate: int, images: int, ms: float, progress: float) -> None:
        """Adds the time of a step. progress: share of an image that is decoded, less 1/2, as the mean of all
        images."""
        is_tree = self._nodes[candidate] > 1
        slope = self._per_image[is_tree]
        if self._last != (candidate, images):
            self._last = candidate, images
            slope.begin()
        # One very long step would spoil the line for many images.
        slope.add(progress, min(ms, 2 * self.of(candidate, images)) / images)
        self._add_in_the_middle(candidate, images, ms, progress)

    def bound(self, candidate: int, images: int, ms: float, progress: float) -> None:
        """Adds the time of a step that may have taken longer than usual. It counts if it is less than 0.9 of
        the estimate, so that noise alone does not lower that."""
        if self._in_the_middle(candidate, images, ms, progress) < 0.9 * self.of(candidate, images):
            self._add_in_the_middle(candidate, images, ms, progress)

    def _add_in_the_middle(self, candidate: int, images: int, ms: float, progress: float) -> None:
        ms = self._in_the_middle(candidate, images, ms, progress)
        self._clock_ms += ms
        if images not in self._estimates:
            self._estimates[images] = self._first(candidate, images, ms)
        self._estimates[images].add(candidate, ms, self._clock_ms)

    def _in_the_middle(self, candidate: int, images: int, ms: float, progress: float) -> float:
        """Returns how long the step would have taken in the middle of the images."""
        is_tree = self._nodes[candidate] > 1
        share = TREES_PER_PLAIN if is_tree else 1 / TREES_PER_PLAIN
        slope = self._per_image[is_tree].value(share * self._per_image[not is_tree].value())
        return ms - min(slope * images * progress, ms / 2)

    def _first(self, candidate: int, images: int, ms: float) -> _Estimates:
        """Returns the estimates before the first step with so many images, which is one of `candidate`."""
        if not self._estimates:
            level = math.log(ms) - self._growth[candidate]
            means = [level + growth for growth in self._growth]
            return _Estimates(means, self._covariance(1.0, SPREAD**2), self._clock_ms)
        nearest = self._nearest(images)
        ratio = abs(math.log(images / nearest))
        added = self._covariance((COMMON_SPREAD * ratio) ** 2, IMAGES_SPREAD**2 * ratio)
        known = self._estimates[nearest].covariance
        covariance = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(known, added, strict=True)]
        means = [math.log(self.of(index, images)) for index in range(len(self._nodes))]
        return _Estimates(means, covariance, self._clock_ms)

    def _covariance(self, common: float, by_distance: float) -> list[list[float]]:
        """Returns the covariance of a random walk from one candidate to the next, plus a common variance."""
        return [[common + by_distance * min(a, b) for a in self._distance] for b in self._distance]

    def _nearest(self, images: int) -> int:
        """Returns the most similar number of images with which steps were timed."""
        return min(self._estimates, key=lambda number: abs(math.log(number / images)))

    def is_new(self, images: int) -> bool:
        """Returns whether no step was timed with more than half as many images in flight."""
        return all(2 * number <= images for number in self._estimates)

    def of(self, candidate: int, images: int) -> float:
        """Returns the time of a step; infinite before the first time of all."""
        if not self._estimates:
            return math.inf
        nearest = self._nearest(images)
        return math.exp(self._estimates[nearest].means[candidate] + GROWTH * math.log(images / nearest))
