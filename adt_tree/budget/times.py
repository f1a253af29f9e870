"""The times of steps, by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import fmean, median_low

# Steps from one decision to the next, counted steps of a trial, and the number of step times whose mean is
# the time of a step.
PERIOD = 8
TRIALS = 5  # number of trials whose median is the time of a step of a candidate that is not in use
# What the first steps of a run say about the cost of longer prefixes is mostly noise. So it counts as if 64
# steps, evenly spread over a quarter of an image, had been timed before: their sum of squared distances from
# the mean is this. All had taken equally long, or as the other kind of steps says: longer prefixes cost trees
# about TREES_PER_PLAIN times as much as plain steps (one to four times, docs/LOG.md).
SEEN_BEFORE, TREES_PER_PLAIN = 1 / 3, 2.0
# The line counts as known once 128 steps, evenly spread over half an image, were timed, or more over less.
KNOWN = 128 / 48
FORGETTING = 0.999  # factor by which every point makes those before it count less


class _Slope:
    """The slope b of y = a + b * x by least squares over stretches of points, each of which has its own a. It
    is at least 0."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        self.begin()

    def value(self, expected: float = 0.0) -> float:
        """expected: the slope of the points that count as seen before."""
        return max((self._xy + SEEN_BEFORE * expected) / (self._xx + SEEN_BEFORE), 0.0)

    @property
    def is_known(self) -> bool:
        return self._xx >= KNOWN

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


# Milliseconds of a step, its `progress` times the images in flight, and whether it had a tree.
_Time = tuple[float, float, bool]


@dataclass(slots=True)
class _Timed:
    """Times of a candidate with one number of images in flight."""

    recent: deque[_Time] = field(default_factory=lambda: deque(maxlen=PERIOD))  # of its use, or last trial
    trials: deque[_Time] = field(default_factory=lambda: deque(maxlen=TRIALS - 1))  # one of each trial before
    is_old: bool = False  # whether the next time replaces all others


class StepTimes:
    """Estimates how long a step of each candidate takes with any number of images in flight.

    Attention reads longer prefixes from step to step, so a step at the end of an image takes longer than one
    at its beginning. What is estimated is the time of a step in the middle of the images. Otherwise a
    candidate that is timed near the end would look worse than one that is timed near the beginning: a plain
    step of 16 images takes 10 ms first and 15 ms last (docs/LOG.md).
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        """nodes: number of nodes of each candidate's trees, root included."""
        self._nodes = nodes
        self._timed: dict[tuple[int, int], _Timed] = {}  # by (candidate, images in flight)
        self._last: _Timed | None = None  # whose time was added last
        # Time that the prefix of one image takes if it is whole, for plain decoding and for trees.
        self._per_image = _Slope(), _Slope()
        self._call_ms, self._node_ms = math.inf, 0.0  # of _on_line()

    def begin(self, candidate: int) -> None:
        """Says that the candidate will be in use from now on. Its earlier times no longer count, but its
        estimate remains until the next time arrives."""
        for timed in self._of_candidate(candidate):
            timed.is_old = True

    def begin_trial(self, candidate: int) -> None:
        """Says that the next times of the candidate are those of a trial."""
        for timed in self._of_candidate(candidate):
            if timed.recent:
                timed.trials.append(self._typical(timed))
                timed.recent.clear()

    def _of_candidate(self, candidate: int) -> list[_Timed]:
        return [timed for key, timed in self._timed.items() if key[0] == candidate]

    def add(self, candidate: int, images: int, ms: float, progress: float, in_use: bool) -> None:
        """Adds the time of a step.

        progress: share of an image that is decoded, less 1/2, as the mean of all images. in_use: the
        candidate is the one in use. When its time changes, all estimates change by the same factor, because
        other programs slow the device down. Without this, the candidate in use would look worse than those
        that were timed before.
        """
        timed = self._timed.setdefault((candidate, images), _Timed())
        is_tree = self._nodes[candidate] > 1
        slope = self._per_image[is_tree]
        if timed is not self._last:
            slope.begin()
            self._last = timed
        # One very long step would spoil the line for many images.
        most = 2 * self._typical(timed)[0] if timed.recent else math.inf
        slope.add(progress, min(ms, most) / images)
        if timed.is_old:
            timed.recent.clear()
            timed.trials.clear()
            timed.is_old = False
        # The least of fewer times falls from time to time, whatever the device does. While the line is not
        # known, longer prefixes would look like a slower device.
        is_comparable = in_use and len(timed.recent) == PERIOD and slope.is_known
        before = self._estimate(timed) if is_comparable else 1.0
        timed.recent.append((ms, images * progress, is_tree))
        if is_comparable:
            factor = self._estimate(timed) / before
            if factor != 1:
                self._scale(factor, timed)

    def bound(self, candidate: int, images: int, ms: float, progress: float) -> None:
        """Adds the time of a step that may have taken longer than usual. It counts if it is less than 0.9 of
        the estimate, so that noise alone does not lower that."""
        time = ms, images * progress, self._nodes[candidate] > 1
        timed = self._timed.get((candidate, images))
        if timed is not None and self._in_the_middle(time) < 0.9 * self._estimate(timed):
            timed.recent.append(time)

    def _typical(self, timed: _Timed) -> _Time:
        """Returns the mean of the recent times; none counts for more than twice their lower quartile.
        If there are fewer than PERIOD - 1 times, it returns the least: other programs make steps slower but
        never faster, and a disturbed step would spoil the mean of a few.

        It is a mean because a quantile favours short steps. A program that runs now and then makes some short
        steps much slower, which a quantile does not show, and all long steps a little slower.
        """
        ordered = sorted(timed.recent, key=self._in_the_middle)
        if len(ordered) < PERIOD - 1:
            return ordered[0]
        most = 2 * ordered[(len(ordered) - 1) // 4][0]
        ms = fmean(min(time[0], most) for time in ordered)
        return ms, fmean(time[1] for time in ordered), ordered[0][2]

    def _in_the_middle(self, time: _Time) -> float:
        """Returns how long the step would have taken in the middle of the images."""
        ms, progress, is_tree = time
        share = TREES_PER_PLAIN if is_tree else 1 / TREES_PER_PLAIN
        slope = self._per_image[is_tree].value(share * self._per_image[not is_tree].value())
        return ms - min(slope * progress, ms / 2)

    def _estimate(self, timed: _Timed) -> float:
        """Returns the median of its trials; the time since begin() counts as one."""
        times = [*timed.trials, self._typical(timed)] if timed.recent else timed.trials
        return median_low(map(self._in_the_middle, times))

    def _scale(self, factor: float, in_use: _Timed) -> None:
        """Multiplies all times by the factor but those of the candidate in use."""
        for timed in self._timed.values():
            if timed is not in_use:
                for times in (timed.recent, timed.trials):
                    for index, (ms, progress, is_tree) in enumerate(times):
                        times[index] = ms * factor, progress, is_tree

    def is_new(self, images: int) -> bool:
        """Returns whether no step was timed with more than half as many images in flight."""
        return all(2 * key[1] <= images for key in self._timed)

    def fit(self) -> None:
        """Fits a line through all estimates: a step takes call_ms, and node_ms for every node of its trees.
        The sum of squared relative errors is least."""
        if not self._timed:
            return
        nodes = [self._nodes[candidate] * images for candidate, images in self._timed]
        # With u = 1 / ms and v = nodes / ms, the errors are call_ms * u + node_ms * v - 1.
        u = [1 / self._estimate(timed) for timed in self._timed.values()]
        v = list(map(mul, nodes, u))
        uu, uv, vv = (sum(map(mul, x, y)) for x, y in ((u, u), (u, v), (v, v)))
        determinant = uu * vv - uv * uv
        if determinant > 1e-6 * uu * vv:  # otherwise all steps had the same number of nodes
            self._node_ms = max(0.0, (uu * sum(v) - uv * sum(u)) / determinant)
        self._call_ms = max(0.0, (sum(u) - self._node_ms * uv) / uu)

    def of(self, candidate: int, images: int) -> float:
        """Returns the time of a step. If it was not measured with so many images in flight, it comes from the
        most similar step, a smaller one of as many images for instance, and changes as the line does, which
        fit() renews; infinite before the first time of all."""
        if not self._timed:
            return math.inf
        if (candidate, images) in self._timed:
            return self._estimate(self._timed[candidate, images])

        def difference(key: tuple[int, int]) -> float:
            nodes = self._nodes[key[0]] / self._nodes[candidate]
            return abs(math.log(nodes)) + abs(math.log(key[1] / images))

        nearest = min(self._timed, key=difference)
        change = self._on_line(candidate, images) / self._on_line(*nearest)
        return self._estimate(self._timed[nearest]) * change

    def _on_line(self, candidate: int, images: int) -> float:
        return self._call_ms + self._node_ms * self._nodes[candidate] * images
