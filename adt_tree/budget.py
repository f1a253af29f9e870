"""The policy of `--total_token auto`, which chooses the size of trees while decoding. No torch here.

A larger tree commits more codes per step and makes every step longer. How much longer depends on the device,
the images in flight and guidance, so it is measured while decoding. The first steps of a run try the
candidate shapes, smallest first, until larger ones cannot be best. From then on the policy takes the shape
that commits most codes per second. A trial wastes nothing, because every step of an exact method commits
right codes whatever its tree; for the same reason the image does not depend on the choice. Source of the
idea: SmartSpec / TurboSpec (arXiv 2406.14066).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from adt_tree.grid import Cell
from adt_tree.policy import PLAIN, AdaptiveTree, Policy, TreeShape, self_drafted
from adt_tree.records import Step

MOST_CHAIN = 23  # most nodes of a chain about as long as a row; trees with more have alternatives as well
TRIAL_STEPS = 3  # counted steps of a candidate's trial; the first, which may record graphs, is not timed
# A deeper self-drafted tree reaches positions that no pass has scored, so its first steps accept less than
# later ones: a chain of 15 after a chain of 7 commits 3.2, 4.6 and then 4.8 codes (docs/LOG.md). So the
# acceptance of the first WARM_UP steps is not counted.
WARM_UP = 2
PERIOD = 8  # steps from one decision to the next
RECENT = 24  # number of step times whose lower quartile is the time of a candidate's step
# Image steps: a step with B images in flight counts as B of them.
MEMORY = 400.0  # image steps over which the acceptance of levels and of candidates is averaged
# The growth law holds where nothing is measured yet: a share h of the steps accepts a code, and a tree of d
# levels accepts h * d ** EXPONENT codes (docs/LOG.md). The law counts as much as LAW_STEPS image steps of
# every level, and h begins at FIRST_HITS.
FIRST_HITS, EXPONENT, LAW_STEPS = 0.5, 0.7, 10.0
# A candidate can accept more or fewer codes than its levels promise, for instance because it is wider. The
# promise counts as much as LEVEL_STEPS of its own image steps.
LEVEL_STEPS = 300.0
# Times change with the load of the device, and one slow moment can spoil the first trial of a shape, or end
# the first trials too early. So plain decoding and the neighbours of the chosen shape are tried again, in
# turn: for the first time at once, and then as long as trials take at most the share TRIAL_COST of a run's
# time. If plain decoding is chosen, its neighbour, the smallest tree, would self-draft badly, because plain
# decoding scores no positions ahead. The first tree of at least EXPLORE_DEPTH levels is tried instead.
TRIAL_COST, EXPLORE_DEPTH = 0.01, 3
# Under plain decoding the images of a batch stay in step. If they draft, they end at different times, and at
# the end of a run slots are idle: with four images a slot that costs about a twentieth of the time. As nobody
# knows how many images will follow, a tree must commit so many times the codes per second of plain decoding.
IN_STEP = 1.05
# Candidates of a drafter network as (levels, drafted nodes): True if passes are rounded up to buckets, False
# if every row of a pass costs. The tree that the model has by default is among the candidates as well.
NETWORK_TREES = {False: ((2, 3), (4, 6), (8, 12)), True: ((2, 7), (4, 15), (8, 63))}


@dataclass(frozen=True, slots=True)
class AutoTree:
    """Trees whose size is chosen while decoding; the type of Method.tree for `--total_token auto`."""

    # The tree that a drafter network grows by default. Candidates vary depth and budget of a TreeShape, and
    # the budget alone of an AdaptiveTree. None: trees are self-drafted.
    base: TreeShape | AdaptiveTree | None = None

    def __str__(self) -> str:
        """Returns the name of these trees in the fingerprint of a run."""
        return f"auto, from {self.base}" if isinstance(self.base, AdaptiveTree) else "auto"

    @property
    def largest(self) -> TreeShape | None:
        """The shape, or the greatest shape, of the base."""
        return self.base.largest if isinstance(self.base, AdaptiveTree) else self.base

    def candidates(self, row_width: int, buckets: bool) -> list[TreeShape]:
        """Returns the shapes to choose from, smallest first; the first is plain decoding.

        row_width: cells of a raster row, W; a chain of W - 1 codes ends just before the cell below its root,
        and longer ones gain less. buckets: the target rounds the rows of a pass, root included, up to 8, 16,
        32, 64 or 128, as under CUDA graphs, so that a smaller tree in the same bucket saves nothing.
        """
        if self.largest is not None:
            return _network_shapes(self.largest, buckets, isinstance(self.base, AdaptiveTree))
        if buckets:
            return [PLAIN, *map(_chain, (7, 15)), *(_across(nodes, row_width) for nodes in (31, 63, 127))]
        chains = sorted({1, 3, 7, min(max(row_width - 1, 11), MOST_CHAIN)})
        return [PLAIN, *map(_chain, chains), _across(min(max(2 * row_width - 1, 31), 63), row_width)]


def _chain(length: int) -> TreeShape:
    return TreeShape(length, 1, length)


def _across(budget: int, row_width: int) -> TreeShape:
    """Returns a self-drafted tree whose main chain reaches beyond the cell below its root, if it can."""
    shape = self_drafted(budget)
    return replace(shape, depth=max(shape.depth, min(row_width + 1, budget)))


def _network_shapes(largest: TreeShape, buckets: bool, adaptive: bool) -> list[TreeShape]:
    """Returns the candidates around the default tree of a drafter network.

    adaptive: depths are chosen elsewhere, so a candidate has the greatest depth that its budget allows.
    """
    shapes = {largest}
    for depth, budget in NETWORK_TREES[buckets]:
        shapes.add(TreeShape(min(largest.depth, budget) if adaptive else depth, largest.width, budget))
    return [PLAIN, *sorted(shapes, key=lambda shape: (shape.budget, shape.depth))]


class _Levels:
    """How many steps accept a code of each level, counted over the last image steps of all candidates.

    Images differ, and so do the regions of an image. So two candidates cannot be compared by the codes that
    each accepted at its time. But the levels of a shallow tree are levels of a deep one too: they show at any
    time what a shallower candidate would accept.
    """

    def __init__(self, deepest: int) -> None:
        """deepest: number of levels of the deepest tree."""
        self._weight = 1.0  # of the next step; it grows, so that older steps weigh less
        self._drafted = [0.0] * (deepest + 1)  # weight of the steps whose tree had 0, 1, 2, ... levels
        self._accepted = [0.0] * (deepest + 1)  # weight of the steps that accepted 0, 1, 2, ... codes

    def count(self, depth: int, accepted: int) -> None:
        """Adds one step of one image."""
        self._drafted[depth] += self._weight
        self._accepted[accepted] += self._weight
        self._weight *= 1 + 1 / MEMORY

    def accepted_codes(self) -> list[float]:
        """Returns the expected number of accepted codes of a tree of 0, 1, 2, ... levels."""
        self._drafted = [weight / self._weight for weight in self._drafted]
        self._accepted = [weight / self._weight for weight in self._accepted]
        self._weight = 1.0
        # By level, the weight of the steps that drafted it, and of those that accepted a code of it.
        drafted = list(accumulate(reversed(self._drafted)))[::-1]
        accepted = list(accumulate(reversed(self._accepted)))[::-1]
        codes, h = [0.0], FIRST_HITS
        for level in range(1, len(drafted)):
            law = h * (level**EXPONENT - (level - 1) ** EXPONENT)
            share = (accepted[level] + LAW_STEPS * law) / (drafted[level] + LAW_STEPS)
            if level == 1:
                h = share
            codes.append(codes[-1] + share)
        return codes


@dataclass(slots=True, eq=False)
class _Candidate:
    """A shape, and the acceptance and time of its steps."""

    shape: TreeShape
    accepted: float = 0.0  # codes accepted in its image steps, older ones with less weight
    promised: float = 0.0  # codes that its levels promised for them
    ms: float = math.inf  # estimated time of a step; infinite before the first trial
    times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # since chosen or tried
    last_trial: int = 0  # number of its last trial after the first ones, counted over all candidates; 0: none

    def count(self, accepted: int, promised: float) -> None:
        """Adds one step of one image."""
        decay = 1 - 1 / MEMORY
        self.accepted, self.promised = self.accepted * decay + accepted, self.promised * decay + promised

    def accepts(self, promised: float, promise_steps: float) -> float:
        """Returns the number of codes that a step is expected to accept if its levels promise so many. The
        promise counts as much as promise_steps image steps."""
        if not promised:
            return 0.0
        prior = promise_steps * promised
        return promised * (self.accepted + prior) / (self.promised + prior)


def lower_quartile(times_ms: Collection[float]) -> float:
    """Returns a typical time. Other programs make single steps slower but never faster, so that the median of
    a few steps may be the time of a disturbed one."""
    return sorted(times_ms)[(len(times_ms) - 1) // 4]


class CostAware:
    """Chooses the shape that commits most codes per second. All images in flight have the same candidate."""

    def __init__(
        self, shapes: Sequence[TreeShape], inner: Policy | None = None, self_drafted: bool = True
    ) -> None:
        """shapes: the candidates, the first of them plain decoding. inner: chooses depth and width within the
        candidate that is taken; None: the candidate is the shape. self_drafted: drafts come from earlier
        passes of the target, so that they depend on the trees of these passes."""
        self._candidates, self._inner = [_Candidate(shape) for shape in shapes], inner
        self._self_drafted = self_drafted
        self._current = self._candidates[0]
        self._chosen: _Candidate | None = None  # by the last choice; None during the first trials
        self._in_a_row = -1  # steps of the current candidate after its first one; -1 before the first step
        self._warm_up = 0  # number of steps in a row that are not counted
        self._scheduled = deque[_Candidate]()  # candidates of the next steps
        self._untried = deque(self._candidates)  # candidates whose first trial is to come, smallest first
        self._trials, self._in_trial = 0, False  # number of trials after the first ones; true during one
        self._total_ms, self._trial_ms = 0.0, 0.0  # time of all steps, and of those trials
        self._levels = _Levels(max(shape.depth for shape in shapes))
        self._promised: list[float] = []  # codes by depth, at the last choice; empty during the first trials
        # An inner policy drafts fewer levels than the candidate allows, so that promises are worth less.
        self._promise_steps = LEVEL_STEPS if inner is None else LAW_STEPS
        self._shapes: dict[int, TreeShape] = {}  # of the present step, by slot
        self._images = 0  # the highest slot that held an image so far, counted from 1
        self._observed = True  # true if an image of the last step has been observed

    @property
    def bounds(self) -> TreeShape:
        return PLAIN

    def reset(self, slot: int, seed: int) -> None:
        """Starts an image. The estimates last for the whole run."""
        if self._inner is not None:
            self._inner.reset(slot, seed)

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        if self._observed:  # the first call after an observation begins a step
            self._observed = False
            self._next_step()
        shape = limit = self._current.shape
        if self._inner is not None:
            inner = self._inner.shape(slot, cell)
            shape = TreeShape(min(inner.depth, limit.depth), min(inner.width, limit.width), limit.budget)
        self._shapes[slot] = shape
        self._images = max(self._images, slot + 1)
        return shape

    def observe(self, slot: int, step: Step, committed: list[Cell]) -> None:
        """Counts a step, unless the end of the image cut its tree."""
        if self._inner is not None:
            self._inner.observe(slot, step, committed)
        if step.depth == self._shapes[slot].depth:
            if step.depth and self._in_a_row >= self._warm_up:
                self._levels.count(step.depth, step.accepted)
                if self._promised:
                    self._current.count(step.accepted, self._promised[self._current.shape.depth])
            if self._in_a_row and not self._observed:  # all images in flight share the step's time
                self._current.times_ms.append(step.ms)
        if not self._observed:
            self._total_ms += step.ms
            self._trial_ms += step.ms if self._in_trial else 0.0
        self._observed = True

    def _next_step(self) -> None:
        self._update_times()
        if not self._scheduled:
            self._schedule()
        upcoming = self._scheduled.popleft()
        self._in_a_row += 1
        if upcoming is not self._current:
            self._warm_up = self._warm_up_of(upcoming)
            self._current, self._in_a_row = upcoming, 0

    def _update_times(self) -> None:
        """Estimates the time of the current candidate's step anew.

        The device may be shared with other programs. So if the chosen candidate has run for long enough, a
        change of its time is taken for a change of the device and applies to all candidates. Otherwise the
        one that ran in a slow moment would look worse than those that were timed before.
        """
        current = self._current
        if not current.times_ms:
            return
        before, current.ms = current.ms, lower_quartile(current.times_ms)
        if current is self._chosen and len(current.times_ms) == RECENT:
            for candidate in self._candidates:
                if candidate is not current:
                    candidate.ms *= current.ms / before

    def _schedule(self) -> None:
        """Chooses the candidate of the next PERIOD steps, or begins a trial of another one if one is due."""
        promised = self._levels.accepted_codes()
        if self._untried and self._may_be_best(self._untried[0], promised):
            self._scheduled.extend(self._trial(self._untried.popleft()))
            return
        self._untried.clear()
        self._promised = promised
        chosen = max(self._candidates, key=self._rate)
        if chosen is not self._chosen:
            chosen.times_ms.clear()
            self._chosen = chosen
        other = self._least_tried(chosen)
        self._in_trial = other is not None and self._is_due(other)
        if other is not None and self._in_trial:
            if other.ms < math.inf:  # otherwise it is the first trial, which a slow moment may spoil as well
                self._trials += 1
                other.last_trial = self._trials
            other.times_ms.clear()
            self._scheduled.extend(self._trial(other))
        else:
            self._scheduled.extend([chosen] * PERIOD)

    def _may_be_best(self, candidate: _Candidate, promised: Sequence[float]) -> bool:
        """Returns whether the candidate would be best so far if its steps were as short as those of the next
        smaller one. If not, neither it nor a larger one is worth a first trial, which would take long with
        many images in flight."""
        timed = [c for c in self._candidates if c.ms < math.inf]
        best = max(((1 + promised[c.shape.depth]) / c.ms for c in timed), default=0.0)
        return not timed or (1 + promised[candidate.shape.depth]) / timed[-1].ms > best

    def _trial(self, candidate: _Candidate) -> list[_Candidate]:
        """Returns the steps of a trial that begins now."""
        return [candidate] * (self._warm_up_of(candidate) + TRIAL_STEPS)

    def _warm_up_of(self, candidate: _Candidate) -> int:
        """Returns how many steps of the candidate are not to be counted if it follows the current one."""
        deeper = candidate.shape.depth > self._current.shape.depth
        return WARM_UP if deeper and self._self_drafted else 0

    def _least_tried(self, chosen: _Candidate) -> _Candidate | None:
        """Returns the candidate to try next while `chosen` is the best; None if there is no other."""
        if chosen.shape.depth:
            at = self._candidates.index(chosen)
            others = [c for n, c in enumerate(self._candidates) if n == 0 or abs(n - at) == 1]
        else:
            least_depth = EXPLORE_DEPTH if self._self_drafted else 1
            deep = [c for c in self._candidates if c.shape.depth >= least_depth]
            others = deep[:1] or self._candidates[1:][-1:]
        return min(others, key=lambda candidate: candidate.last_trial, default=None)

    def _is_due(self, candidate: _Candidate) -> bool:
        """Returns whether the candidate has had at most its first trial, or another one keeps the time of all
        trials within TRIAL_COST."""
        expected_ms = len(self._trial(candidate)) * candidate.ms
        return not candidate.last_trial or self._trial_ms + expected_ms <= TRIAL_COST * self._total_ms

    def _rate(self, candidate: _Candidate) -> float:
        """Returns the codes per millisecond that the candidate is expected to commit. In a batch those of
        plain decoding count IN_STEP times."""
        promised = self._promised[candidate.shape.depth]
        rate = (1 + candidate.accepts(promised, self._promise_steps)) / candidate.ms
        return rate if candidate.shape.depth or self._images < 2 else IN_STEP * rate
