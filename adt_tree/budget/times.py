"""The times of steps, by the shape of their trees and by the number of images in flight."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from functools import partial
from operator import mul
from statistics import median_low

# Steps from one decision to the next, counted steps of a trial, and the number of step times whose lower
# quartile is the time of a step.
PERIOD = 8
TRIALS = 5  # number of trials whose median is the time of a step of a candidate that is not in use


def lower_quartile(times_ms: Collection[float]) -> float:
    """Returns the lower quartile; of up to four times, the least. Other programs make single steps slower but
    never faster, so the median of a few steps may be the time of a disturbed one."""
    return sorted(times_ms)[(len(times_ms) - 1) // 4]


class StepTimes:
    """Estimates how long a step of each candidate takes with any number of images in flight."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """nodes: number of nodes of each candidate's trees, root included."""
        self._nodes = nodes
        self._ms: dict[tuple[int, int], float] = {}  # estimates by (candidate, images in flight)
        # For each key of _ms: single times since begin() or begin_trial(), and the times of earlier trials.
        self._recent = defaultdict[tuple[int, int], deque[float]](partial(deque, maxlen=PERIOD))
        self._trials = defaultdict[tuple[int, int], deque[float]](partial(deque, maxlen=TRIALS - 1))
        self._call_ms, self._node_ms = math.inf, 0.0  # of _on_line()

    def begin(self, candidate: int) -> None:
        """Says that the candidate will be in use from now on. Its earlier times no longer count, but its
        estimate remains until the next time arrives."""
        for store in (self._recent, self._trials):
            for key in [key for key in store if key[0] == candidate]:
                del store[key]

    def begin_trial(self, candidate: int) -> None:
        """Says that the next times of the candidate are those of a trial."""
        for key in [key for key in self._recent if key[0] == candidate]:
            self._trials[key].append(lower_quartile(self._recent.pop(key)))

    def add(self, candidate: int, images: int, ms: float, in_use: bool) -> None:
        """Adds the time of a step.

        in_use: the candidate is the one in use. When its time changes, all estimates change by the same
        factor. Other programs slow the device down, and steps take longer from row to row of an image,
        because its prefix grows. Without this, the candidate in use would look worse than those that were
        timed before. So candidates are compared by the times at which one follows the other, those of trials.
        """
        key = candidate, images
        before = self.of(candidate, images) if in_use else math.inf
        self._recent[key].append(ms)
        now = self._estimate(key)
        if before not in (now, math.inf):
            self._scale(now / before, except_for=key)

    def _estimate(self, key: tuple[int, int]) -> float:
        """Renews an estimate, and returns it."""
        self._ms[key] = median_low([*self._trials[key], lower_quartile(self._recent[key])])
        return self._ms[key]

    def end_trial(self, candidate: int, images: int, change: float) -> None:
        """Corrects the estimate of a candidate after its trial, which was compared with the steps before it.

        change: the factor by which the time of the candidate in use has changed since then. Along an image it
        is greater than 1, and half of the change took place before the middle of the trial. Without the
        correction every trial would make the candidate in use look better than it is.
        """
        key = candidate, images
        if key in self._recent:
            self._recent[key] = deque((ms * change**-0.5 for ms in self._recent[key]), PERIOD)
            self._estimate(key)

    def _scale(self, factor: float, except_for: tuple[int, int]) -> None:
        for key in self._ms.keys() - {except_for}:
            self._ms[key] *= factor
            for store in (self._recent, self._trials):
                if key in store:
                    store[key] = deque((ms * factor for ms in store[key]), store[key].maxlen)

    def is_timed(self, candidate: int) -> bool:
        """Returns whether a step of the candidate was timed."""
        return any(key[0] == candidate for key in self._ms)

    def fit(self) -> None:
        """Fits a line through all estimates: a step takes call_ms, and node_ms for every node of its trees.
        The sum of squared relative errors is least."""
        if not self._ms:
            return
        nodes = [self._nodes[candidate] * images for candidate, images in self._ms]
        # With u = 1 / ms and v = nodes / ms, the errors are call_ms * u + node_ms * v - 1.
        u = [1 / ms for ms in self._ms.values()]
        v = list(map(mul, nodes, u))
        uu, uv, vv = (sum(map(mul, x, y)) for x, y in ((u, u), (u, v), (v, v)))
        determinant = uu * vv - uv * uv
        if determinant > 1e-6 * uu * vv:  # otherwise all steps had the same number of nodes
            self._node_ms = max(0.0, (uu * sum(v) - uv * sum(u)) / determinant)
        self._call_ms = max(0.0, (sum(u) - self._node_ms * uv) / uu)

    def of(self, candidate: int, images: int) -> float:
        """Returns the time of a step. If it was not measured with so many images in flight, it comes from the
        nearest number and changes as the line does, which fit() renews; infinite before the first time of
        all."""
        if (candidate, images) in self._ms:
            return self._ms[candidate, images]
        timed = [key[1] for key in self._ms if key[0] == candidate]
        here = self._on_line(candidate, images)
        if not timed:
            return here
        nearest = min(timed, key=lambda number: max(number / images, images / number))
        return self._ms[candidate, nearest] * here / self._on_line(candidate, nearest)

    def _on_line(self, candidate: int, images: int) -> float:
        return self._call_ms + self._node_ms * self._nodes[candidate] * images
