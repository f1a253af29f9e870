"""The policy that sizes trees by what their steps cost and commit."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adt_tree.budget.acceptance import MEMORY, Levels, refinement_of
from adt_tree.budget.in_step import FREE_IMAGES, InStep
from adt_tree.budget.times import PERIOD, StepTimes
from adt_tree.policy import PLAIN, Policy, TreeShape
from adt_tree.records import Step

# Counted steps of a first trial. The first step after a change of candidate, or of the number of images, is
# not timed, because it may record graphs.
FIRST_STEPS = 3
# A deeper self-drafted tree reaches positions that no pass has scored, so its first steps accept less than
# later ones: a chain of 15 after one of 7 commits 3.9, 3.3, 3.4, 4.7, 4.3, 4.0 and then 5 (docs/LOG.md). A
# shallower tree accepts more at first, because the deeper one has scored its positions. So the acceptance of
# the first WARM_UP steps after a change of depth is not counted, and the chosen candidate is kept for STAY
# periods, unless the number of images changes.
WARM_UP, STAY = 6, 3
# A candidate can accept more or fewer codes than its levels promise, for instance because it is wider. But
# an image's mean of accepted codes varies by a fifth, so the promise counts as much as LEVEL_STEPS of its own
# image steps (with 100, runs had 0.86 of the best speed). If an inner policy drafts fewer levels than the
# candidate allows, it counts as much as INNER_LEVEL_STEPS.
LEVEL_STEPS, INNER_LEVEL_STEPS = 300.0, 10.0
# Times change with the load of the device, and one slow moment can spoil the first trial of a shape, or end
# the first trials too early. So plain decoding and the neighbours of the chosen shape are tried again: each
# once without delay, and then the one whose trials have lost least time, as long as all trials lose at most
# the share TRIAL_LOSS of a run's time. EARLY_STEPS steps of the chosen shape count as part of that time from
# the start, so that early mistakes are soon found. What a trial loses is estimated from the codes per second
# of its shape and of the chosen one, so that a shape that is nearly as good is tried often. But a trial
# counts as a loss of at least LEAST_LOSS of its time, for the first steps after it may accept less as well.
# If plain decoding is chosen, its neighbour, the smallest tree, would self-draft badly, because plain
# decoding scores no positions ahead. The first tree of at least EXPLORE_DEPTH levels is tried instead.
TRIAL_LOSS, EARLY_STEPS, LEAST_LOSS, EXPLORE_DEPTH = 0.01, 500, 0.1, 3
# A trial of a batch in step ends with PROBE_STEPS steps of each of the next PROBES larger self-drafted trees.
# The first step of each is not timed. Larger trees may pay where the tree that is tried does not.
PROBES, PROBE_STEPS = 2, 2


@dataclass(slots=True, eq=False)
class _Candidate:
    """A shape, and the acceptance of its steps."""

    index: int  # among the candidates
    shape: TreeShape
    refinement: float  # factor by which it accepts more codes than a smaller tree of as many levels
    accepted: float = 0.0  # codes accepted in its image steps, older ones with less weight
    promised: float = 0.0  # codes that its levels promised for them
    # Time that its trials are estimated to have lost, without its first two. Each later trial of any
    # candidate halves it. None: it had at most one trial.
    lost_ms: float | None = None

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


class CostAware:
    """Chooses the shape that commits most codes per second. All images in flight have the same candidate."""

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        inner: Policy | None = None,
        self_drafted: bool = True,
        idle_slots_cost: bool = False,
        positions: int = sys.maxsize,
    ) -> None:
        """shapes: at least two candidates, the first of them plain decoding. inner: chooses depth and width
        within the candidate that is taken; None: the candidate is the shape. self_drafted: drafts come from
        earlier passes of the target, so that they depend on the trees of these passes. idle_slots_cost: a
        step takes equally long whatever number of slots hold images, or take part in it. positions: number of
        codes of an image."""
        self._candidates = [
            _Candidate(index, shape, refinement_of(shape.num_nodes) if self_drafted else 1.0)
            for index, shape in enumerate(shapes)
        ]
        self._inner, self._self_drafted, self._idle_slots_cost = inner, self_drafted, idle_slots_cost
        self._positions = positions
        self._current = self._candidates[0]
        # By the last choice; None during the first trials, and while a batch that began together decodes
        # plainly.
        self._chosen: _Candidate | None = None
        # Steps since the candidate or the number of images changed: 0 at the first of them, -1 before it.
        self._in_a_row = -1
        self._warm_up = 0  # number of steps in a row that are not counted
        self._scheduled = deque[_Candidate]()  # candidates of the next steps
        self._untried = deque(self._candidates)  # candidates whose first trial is to come, smallest first
        # The candidate of the last trial, and the time of a step of the chosen one before it; None if steps
        # after it have been compared as well.
        self._tried: tuple[_Candidate, float] | None = None
        # Time of all steps outside batches in step, and what trials are estimated to have lost of it.
        self._total_ms, self._lost_ms = 0.0, 0.0
        self._times = StepTimes([shape.num_nodes for shape in shapes])
        self._levels = Levels(max(shape.depth for shape in shapes))
        # Codes by candidate, at the last choice; empty during the first trials.
        self._promised: list[float] = []
        self._promise_steps = LEVEL_STEPS if inner is None else INNER_LEVEL_STEPS
        self._shapes: Mapping[int, TreeShape] = {}  # of the present step, by slot
        self._in_step = InStep(self_drafted)
        self._images = 0  # number of images in flight
        self._first = 0  # root of the image that is furthest
        self._is_in_step = False  # whether all roots are equal
        # Whether a trial has put the images out of step, and no other image has begun since.
        self._may_wait = False
        # Whether images waited in the last step, and whether the last step was not scheduled for that reason.
        self._has_waited = self._is_extra = False

    @property
    def bounds(self) -> TreeShape:
        return PLAIN

    def reset(self, slot: int, seed: int) -> None:
        """Starts an image. The estimates last for the whole run."""
        self._may_wait = False
        if self._inner is not None:
            self._inner.reset(slot, seed)

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
        behind = self._behind(roots)
        # A step without trees for all images follows those in which some waited.
        self._is_extra = bool(behind) or (self._has_waited and any(roots.values()))
        self._has_waited = bool(behind)
        if self._is_extra:
            return dict.fromkeys(behind or roots, PLAIN)
        self._next_step(roots)
        limit = self._current.shape
        if self._inner is None:
            self._shapes = dict.fromkeys(roots, limit)
        else:
            self._shapes = {
                slot: TreeShape(min(shape.depth, limit.depth), min(shape.width, limit.width), limit.budget)
                for slot, shape in self._inner.shapes(roots).items()
            }
        return self._shapes

    def _behind(self, roots: Mapping[int, int]) -> list[int]:
        """Returns the last images of a batch that a trial has put out of step. If there are any, they alone
        take part in the next step, so that the batch gets in step again. The step is shorter without the
        images that wait."""
        is_due = self._may_wait and self._in_step.is_plain and not self._scheduled
        if not is_due or len(roots) <= FREE_IMAGES:
            return []
        last = min(roots.values())
        behind = [slot for slot, root in roots.items() if root == last]
        self._may_wait = len(behind) < len(roots)
        return behind if self._may_wait else []

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Counts the steps of the images whose trees the end of the image did not cut."""
        if self._inner is not None:
            self._inner.observe(steps)
        if not steps or self._is_extra:
            return
        ms = next(iter(steps.values())).ms  # all images in flight share the step's time
        whole = [step for slot, step in steps.items() if step.depth == self._shapes[slot].depth]
        counted = whole if self._in_a_row >= self._warm_up else []
        if self._in_step.is_plain:
            self._in_step.add(self._current.shape.depth, counted, ms, bool(self._in_a_row and whole))
        else:
            self._total_ms += ms
            if self._in_a_row and whole:
                in_use = self._current is self._chosen
                self._times.add(self._current.index, self._paid_images, ms, in_use)
        if self._current.shape.depth:
            self._count(counted)

    def _count(self, steps: Sequence[Step]) -> None:
        """Counts what the images accepted in one step."""
        for step in steps:
            self._levels.count(step.depth, step.accepted, self._current.refinement)
            if self._promised:
                self._current.count(step.accepted, self._promised[self._current.index])

    def _next_step(self, roots: Mapping[int, int]) -> None:
        has_changed, self._images = self._images != len(roots), len(roots)
        self._first = max(roots.values())
        self._is_in_step = min(roots.values()) == self._first
        in_first_trials = self._chosen is None and not self._in_step.is_plain
        if not any(roots.values()):  # all images have just begun
            self._in_step.begin(self._images)
            has_changed = True
        if has_changed:
            self._in_a_row, self._tried = -1, None
        # A change of the images leads to a new choice. It ends a trial too, because its times cannot be
        # compared with those before the change.
        if not self._scheduled or (has_changed and (self._in_step.is_plain or not in_first_trials)):
            self._schedule()
        upcoming = self._scheduled.popleft()
        self._in_a_row += 1
        if upcoming is not self._current:
            self._warm_up = self._warm_up_of(upcoming)
            self._current, self._in_a_row = upcoming, 0

    @property
    def _paid_images(self) -> int:
        """The number of images that the time of a step depends on."""
        return 1 if self._idle_slots_cost else self._images

    def _ms(self, candidate: _Candidate) -> float:
        """Returns the time of a step of the candidate with as many images in flight as now."""
        return self._times.of(candidate.index, self._paid_images)

    def _schedule(self) -> None:
        """Chooses the candidate of the next PERIOD steps, or begins a trial of another one if one is due."""
        self._scheduled.clear()
        self._in_step.update(self._images)
        if self._in_step.is_plain and self._in_step.judge():
            self._begin_anew()
        promised = self._promise()
        if self._in_step.is_plain:
            self._schedule_in_step()
            return
        self._times.fit()
        if self._untried and self._may_be_best(self._untried[0], promised):
            # Plain decoding, with which all others are compared, is tried for longer.
            steps = FIRST_STEPS if self._times.is_timed(0) else PERIOD
            self._begin_trial(self._untried.popleft(), steps)
        else:
            self._untried.clear()
            self._promised = promised
            self._end_trial()
            self._schedule_around(max(self._candidates, key=self._hoped_rate))

    def _promise(self) -> list[float]:
        """Returns the number of codes that the levels of each candidate promise."""
        codes = self._levels.accepted_codes()
        return [min(c.shape.depth, codes[c.shape.depth] * c.refinement) for c in self._candidates]

    def _end_trial(self) -> None:
        """Corrects the time of the last trial once steps of the chosen candidate have followed it."""
        if self._tried and self._current is self._chosen:
            tried, before_ms = self._tried
            change = self._ms(self._chosen) / before_ms
            self._times.end_trial(tried.index, self._paid_images, change)
            self._tried = None

    def _begin_anew(self) -> None:
        """Begins the first trials again. Times of rows far above would mislead, because attention was shorter
        there."""
        self._times = StepTimes([candidate.shape.num_nodes for candidate in self._candidates])
        self._untried, self._promised = deque(self._candidates), []
        for candidate in self._candidates:
            candidate.lost_ms = None

    def _schedule_in_step(self) -> None:
        """Schedules steps of a batch in step: plain ones, or a trial if one is due."""
        self._chosen, plain = None, self._candidates[0]
        trial = self._trial_in_step()
        # An image that ended in a trial would leave its slot to one that begins while the others go on, so
        # that the batch would stay out of step. PERIOD plain steps must follow as well, or it is not judged.
        # Of images that are too short for any trial none waits.
        room = self._positions - 2 - PERIOD - sum(candidate.shape.depth + 1 for candidate in trial)
        waits = self._is_in_step and not self._idle_slots_cost and room >= PERIOD
        if self._in_step.is_due() and (self._first <= room or not waits):
            self._scheduled.extend(trial)
            self._may_wait = waits
        else:
            self._scheduled.extend([plain] * PERIOD)

    def _trial_in_step(self) -> list[_Candidate]:
        """Returns the candidates of the steps of a trial."""
        tree = self._least_tried(self._candidates[0])
        larger = self._candidates[tree.index + 1 :][: PROBES if self._self_drafted else 0]
        trial = [tree] * (self._warm_up_of(tree) + PERIOD)
        return [*trial, *(candidate for candidate in larger for _ in range(PROBE_STEPS))]

    def _schedule_around(self, chosen: _Candidate) -> None:
        """Schedules steps of the chosen candidate, or a trial of another one if one is due."""
        if chosen is not self._chosen:
            self._times.begin(chosen.index)
            self._chosen, self._tried = chosen, None
            if self._warm_up_of(chosen):
                self._scheduled.extend([chosen] * STAY * PERIOD)
                return
        other = self._least_tried(chosen)
        if self._is_due(other, chosen):
            # A trial of a candidate without a time does not count: a slow moment might spoil its only one.
            if self._times.is_timed(other.index):
                self._count_loss(other, chosen)
            self._times.begin_trial(other.index)
            self._tried = other, self._ms(chosen)
            self._begin_trial(other, PERIOD)
        else:
            self._scheduled.extend([chosen] * PERIOD)

    def _may_be_best(self, candidate: _Candidate, promised: Sequence[float]) -> bool:
        """Returns whether the candidate would be best so far if its steps were as short as those of the next
        smaller one. If not, neither it nor a larger one is worth a first trial, which would take long with
        many images in flight."""
        timed = [c for c in self._candidates if self._times.is_timed(c.index)]
        best = max(((1 + promised[c.index]) / self._ms(c) for c in timed), default=0.0)
        return not timed or (1 + promised[candidate.index]) / self._ms(timed[-1]) > best

    def _begin_trial(self, candidate: _Candidate, steps: int) -> None:
        """Schedules a trial with so many counted steps."""
        self._scheduled.extend([candidate] * (self._warm_up_of(candidate) + steps))

    def _warm_up_of(self, candidate: _Candidate) -> int:
        """Returns how many steps of the candidate are not to be counted if it follows the current one."""
        changes = candidate.shape.depth not in (0, self._current.shape.depth)
        return WARM_UP if changes and self._self_drafted else 0

    def _least_tried(self, chosen: _Candidate) -> _Candidate:
        """Returns the candidate to try next while `chosen` is the best."""
        if chosen.shape.depth:
            at = chosen.index
            others = [c for n, c in enumerate(self._candidates) if n == 0 or abs(n - at) == 1]
        else:
            least_depth = EXPLORE_DEPTH if self._self_drafted else 1
            deep = [c for c in self._candidates if c.shape.depth >= least_depth]
            others = deep[:1] or self._candidates[-1:]
        return min(others, key=lambda c: -1.0 if c.lost_ms is None else c.lost_ms)

    def _is_due(self, candidate: _Candidate, chosen: _Candidate) -> bool:
        """Returns whether a trial of the candidate may begin. The last PERIOD steps, with which it is
        compared, must be of the chosen candidate with as many images in flight. A candidate's second trial is
        free; later ones may bring the loss of all trials to at most TRIAL_LOSS of the time."""
        if self._current is not chosen or self._in_a_row < PERIOD - 1:
            return False
        lost_ms = self._lost_ms + self._loss_ms(candidate, chosen)
        credited_ms = self._total_ms + EARLY_STEPS * self._ms(chosen)
        return candidate.lost_ms is None or lost_ms <= TRIAL_LOSS * credited_ms

    def _count_loss(self, tried: _Candidate, chosen: _Candidate) -> None:
        """Counts what a trial is expected to lose, unless it is the second one of its candidate."""
        loss_ms = 0.0 if tried.lost_ms is None else self._loss_ms(tried, chosen)
        self._lost_ms += loss_ms
        for candidate in self._candidates:
            if candidate.lost_ms is not None:
                candidate.lost_ms /= 2
        tried.lost_ms = (tried.lost_ms or 0.0) + loss_ms

    def _loss_ms(self, candidate: _Candidate, chosen: _Candidate) -> float:
        """Returns the time that a trial of the candidate is expected to lose."""
        steps = self._warm_up_of(candidate) + PERIOD
        loss = 1 - self._rate(candidate) / self._rate(chosen)
        return steps * self._ms(candidate) * max(LEAST_LOSS, loss)

    def _hoped_rate(self, candidate: _Candidate) -> float:
        """Returns the rate that decides which candidate is chosen."""
        return self._rate(candidate, self._levels.optimism(candidate.shape.depth))

    def _rate(self, candidate: _Candidate, optimism: float = 1.0) -> float:
        """Returns the codes per millisecond that the candidate is expected to commit.

        Once trials in step have shown that trees pay, plain decoding must beat a tree by the least gain, as a
        tree had to beat it: images that draft are out of step, and plain decoding would not bring them
        together.
        """
        promised = self._promised[candidate.index]
        accepted = optimism * candidate.accepts(promised, self._promise_steps)
        rate = (1 + accepted) / self._ms(candidate)
        counts_less = self._images > FREE_IMAGES and not candidate.shape.depth and self._in_step.trees_pay()
        return rate / self._in_step.least_gain() if counts_less else rate
