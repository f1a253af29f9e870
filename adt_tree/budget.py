"""The size of trees where nobody gives one: the policy of `--total_token auto`. No torch here.

A larger tree commits more codes per step and makes every step longer. How much longer depends on the device,
the images in flight and guidance, so it is measured while decoding: the first steps of a run try every
candidate shape, and from then on the policy takes the one that commits most codes per second. A trial wastes
nothing, because every step of an exact method commits right codes whatever its tree; for the same reason the
image does not depend on the choice. Source of the idea: SmartSpec / TurboSpec (arXiv 2406.14066).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from adt_tree.grid import Cell
from adt_tree.policy import TreeShape, self_drafted
from adt_tree.records import Step

MOST_CHAIN = 23  # nodes of a pure chain; larger budgets have alternatives beside a shorter chain
TRIAL_STEPS = 3  # steps of every candidate at the start; in the first a device may prepare, it is not timed
PERIOD = 8  # steps from one decision to the next
RECENT = 24  # step times of a candidate; their median is what its step costs
MEMORY = 400.0  # image steps over which a candidate's acceptance is averaged
PRIOR_STEPS = 12.0  # image steps that the growth law weighs beside what a candidate itself accepted
# The growth law: a step accepts c * depth ** EXPONENT codes. That rises for longer than in a chain of
# independent levels, because every pass refines the next drafts along the whole chain. c and the exponent are
# fitted to the run; the exponent starts from this value, which chains of 1 to 15 codes gave (docs/LOG.md).
EXPONENT = 0.7
OPTIMISM = 0.5  # of the spread of a step's accepted codes, which is about as large as their mean
# While plain decoding is best, a short chain is drafted now and then, or a run could never leave it again. As
# a step of it costs less than three plain ones, 2 of 256 steps cost less than 2 %.
EXPLORE_EVERY, EXPLORE_STEPS, EXPLORE_DEPTH = 256, 2, 3


@dataclass(frozen=True, slots=True)
class AutoTree:
    """Trees whose size is chosen while decoding; the type of Method.tree for `--total_token auto`."""

    def candidates(self, row_width: int, buckets: bool) -> list[TreeShape]:
        """Returns the shapes to choose from, smallest first; the first is plain decoding.

        row_width: cells of a raster row, W; a chain of W - 1 codes ends above-right of where it began, and
        longer ones gain little. buckets: the target rounds the rows of a pass, root included, up to 8, 16, 32
        or 64, as under CUDA graphs, so that a smaller tree in the same bucket saves nothing.
        """
        if buckets:
            trees = [self_drafted(budget) for budget in (31, 63)]
            trees = [TreeShape(max(t.depth, min(row_width + 1, t.budget)), t.width, t.budget) for t in trees]
            return [TreeShape(0, 0, 0), TreeShape(7, 1, 7), TreeShape(15, 1, 15), *trees]
        lengths = sorted({1, 3, 7, min(max(row_width - 1, 11), MOST_CHAIN)})
        return [TreeShape(0, 0, 0), *(TreeShape(n, 1, n) for n in lengths), self_drafted(31)]


@dataclass(slots=True, eq=False)
class _Candidate:
    """A shape with what its steps have accepted and cost."""

    shape: TreeShape
    steps: float = 0.0  # image steps, older ones with less weight
    accepted: float = 0.0  # codes accepted in them, likewise
    times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count(self, accepted: int) -> None:
        """Take in one step of one image."""
        keep = 1 - 1 / MEMORY
        self.steps, self.accepted = self.steps * keep + 1, self.accepted * keep + accepted


class CostAware:
    """Takes the shape that commits most codes per second, one shape for all images in flight."""

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        """shapes: the candidates; one of depth 0 is plain decoding."""
        self._candidates = [_Candidate(shape) for shape in shapes]
        # What the next steps run whatever the estimates say: at first every candidate, the largest first.
        self._scheduled = deque(c for c in self._candidates[::-1] for _ in range(TRIAL_STEPS))
        self._chosen = self._current = self._scheduled.popleft()
        self._steps = self._in_a_row = 0  # steps since the start, and since another shape ran
        self._observed = False  # whether an image of the present step has been observed

    @property
    def bounds(self) -> TreeShape:
        return TreeShape(0, 0, 0)

    def reset(self, slot: int, seed: int) -> None:
        """What steps cost and commit is kept from image to image."""

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        if self._observed:  # the first call after an observation begins a step
            self._observed = False
            self._next_step()
        return self._current.shape

    def observe(self, slot: int, step: Step, committed: list[Cell]) -> None:
        """Count a step whose tree the end of the image did not cut."""
        if (step.depth, step.width) == (self._current.shape.depth, self._current.shape.width):
            self._current.count(step.accepted)
            if self._in_a_row and not self._observed:  # all images in flight share the step's time
                self._current.times_ms.append(step.ms)
        self._observed = True

    def _next_step(self) -> None:
        self._steps += 1
        if self._scheduled:
            upcoming = self._scheduled.popleft()
        else:
            if self._steps % PERIOD == 0:
                self._chosen = max(self._candidates, key=self._rates().__getitem__)
            upcoming = self._chosen
            if not upcoming.shape.depth and self._steps % EXPLORE_EVERY == 0:
                chain = next(c for c in self._candidates if c.shape.depth >= EXPLORE_DEPTH)
                self._scheduled.extend([chain] * EXPLORE_STEPS)
        self._in_a_row = self._in_a_row + 1 if upcoming is self._current else 0
        self._current = upcoming

    def _rates(self) -> dict[_Candidate, float]:
        """The codes per millisecond that every candidate may reach, 0 if it has not been timed.

        The estimate is optimistic, the more so the fewer steps it rests on: a candidate that was unlucky in
        its trial is tried again while it may still be the best (an upper confidence bound).
        """
        scale, exponent = self._growth()
        rates = {}
        for candidate in self._candidates:
            depth, steps = candidate.shape.depth, candidate.steps
            expected = scale * depth**exponent if depth else 0.0
            mean = (candidate.accepted + PRIOR_STEPS * expected) / (steps + PRIOR_STEPS)
            codes = 1 + mean * (1 + OPTIMISM / math.sqrt(steps + 1))
            rates[candidate] = codes / median(candidate.times_ms) if candidate.times_ms else 0.0
        return rates

    def _growth(self) -> tuple[float, float]:
        """c and the exponent of the growth law, by least squares between logarithms.

        A candidate weighs as its steps do; the exponent is pulled towards EXPONENT.
        """
        points = [(math.log(c.shape.depth), math.log(max(c.accepted / c.steps, 0.02)), c.steps)
                  for c in self._candidates if c.shape.depth and c.steps]  # fmt: skip
        total = sum(weight for _, _, weight in points)
        if not total:
            return 0.0, EXPONENT
        mean_x = sum(weight * x for x, _, weight in points) / total
        mean_y = sum(weight * y for _, y, weight in points) / total
        xx = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
        xy = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points)
        exponent = (xy + PRIOR_STEPS * EXPONENT) / (xx + PRIOR_STEPS)
        return math.exp(mean_y - exponent * mean_x), exponent
