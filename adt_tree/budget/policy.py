"""The policy that sizes trees by what their steps cost and commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adt_tree.budget.acceptance import LAW_STEPS, MEMORY, Levels
from adt_tree.budget.in_step import LEAST_GAIN, InStep
from adt_tree.budget.times import StepTimes
from adt_tree.policy import PLAIN, Policy, TreeShape
from adt_tree.records import Step

TRIAL_STEPS = 3  # counted steps of a candidate's trial; the first, which may record graphs, is not timed
# A deeper self-drafted tree reaches positions that no pass has scored, so its first steps accept less than
# later ones: a chain of 15 after a chain of 7 commits 3.2, 4.6 and then 4.8 codes (docs/LOG.md). So the
# acceptance of the first WARM_UP steps is not counted.
WARM_UP = 2
PERIOD = 8  # steps from one decision to the next
# A candidate can accept more or fewer codes than its levels promise, for instance because it is wider. The
# promise counts as much as LEVEL_STEPS of its own image steps.
LEVEL_STEPS = 300.0
# Times change with the load of the device, and one slow moment can spoil the first trial of a shape, or end
# the first trials too early. So plain decoding and the neighbours of the chosen shape are tried again, in
# turn: for the first time at once, and then as long as trials take at most the share TRIAL_COST of a run's
# time. If plain decoding is chosen, its neighbour, the smallest tree, would self-draft badly, because plain
# decoding scores no positions ahead. The first tree of at least EXPLORE_DEPTH levels is tried instead.
TRIAL_COST, EXPLORE_DEPTH = 0.01, 3


@dataclass(slots=True, eq=False)
class _Candidate:
    """A shape, and the acceptance of its steps."""

    index: int  # among the candidates
    shape: TreeShape
    accepted: float = 0.0  # codes accepted in its image steps, older ones with less weight
    promised: float = 0.0  # codes that its levels promised for them
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


class CostAware:
    """Chooses the shape that commits most codes per second. All images in flight have the same candidate."""

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        inner: Policy | None = None,
        self_drafted: bool = True,
        idle_slots_cost: bool = False,
    ) -> None:
        """shapes: the candidates, the first of them plain decoding. inner: chooses depth and width within the
        candidate that is taken; None: the candidate is the shape. self_drafted: drafts come from earlier
        passes of the target, so that they depend on the trees of these passes. idle_slots_cost: a step
        takes equally long whatever number of slots hold images."""
        self._candidates = [_Candidate(index, shape) for index, shape in enumerate(shapes)]
        self._inner, self._self_drafted, self._idle_slots_cost = inner, self_drafted, idle_slots_cost
        self._current = self._candidates[0]
        self._chosen: _Candidate | None = None  # by the last choice; None during the first trials
        self._in_a_row = -1  # steps of the current candidate after its first one; -1 before the first step
        self._warm_up = 0  # number of steps in a row that are not counted
        self._scheduled = deque[_Candidate]()  # candidates of the next steps
        self._untried = deque(self._candidates)  # candidates whose first trial is to come, smallest first
        self._trials, self._in_trial = 0, False  # number of trials after the first ones; true during one
        self._total_ms, self._trial_ms = 0.0, 0.0  # time of all steps, and of trials that TRIAL_COST limits
        self._since_trial_ms = 0.0  # time of the steps since the last trial of any kind
        self._times = StepTimes([shape.num_nodes for shape in shapes])
        self._levels = Levels(max(shape.depth for shape in shapes))
        self._promised: list[float] = []  # codes by depth, at the last choice; empty during the first trials
        # An inner policy drafts fewer levels than the candidate allows, so that promises are worth less.
        self._promise_steps = LEVEL_STEPS if inner is None else LAW_STEPS
        self._shapes: Mapping[int, TreeShape] = {}  # of the present step, by slot
        self._in_step = InStep()
        self._images = 0  # number of images in flight

    @property
    def bounds(self) -> TreeShape:
        return PLAIN

    def reset(self, slot: int, seed: int) -> None:
        """Starts an image. The estimates last for the whole run."""
        if self._inner is not None:
            self._inner.reset(slot, seed)

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
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

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Counts the steps of the images whose trees the end of the image did not cut."""
        if self._inner is not None:
            self._inner.observe(steps)
        if not steps:
            return
        ms = next(iter(steps.values())).ms  # all images in flight share the step's time
        self._total_ms += ms
        self._since_trial_ms += ms
        if self._in_trial and not self._in_step.is_plain:  # InStep.share() limits the others
            self._trial_ms += ms
        whole = [step for slot, step in steps.items() if step.depth == self._shapes[slot].depth]
        if self._in_a_row and whole:
            in_use = self._current is self._chosen
            self._times.add(self._current.index, self._paid_images(self._images), ms, in_use)
        if self._in_a_row >= self._warm_up:
            self._count(whole, ms)

    def _count(self, steps: Sequence[Step], ms: float) -> None:
        """Counts what the images accepted in one step."""
        if self._in_step.is_plain and steps:
            self._in_step.add(steps, ms)
        if not self._current.shape.depth:
            return
        for step in steps:
            self._levels.count(step.depth, step.accepted)
            if self._promised:
                self._current.count(step.accepted, self._promised[self._current.shape.depth])

    def _next_step(self, roots: Mapping[int, int]) -> None:
        has_changed, self._images = self._images != len(roots), len(roots)
        if not any(roots.values()):  # all images have just begun
            self._in_step.begin(self._images)
            has_changed = True
        if not self._scheduled or (has_changed and self._chosen and not self._in_trial):
            self._schedule()
        upcoming = self._scheduled.popleft()
        self._in_a_row += 1
        if upcoming is not self._current:
            self._warm_up = self._warm_up_of(upcoming)
            self._current, self._in_a_row = upcoming, 0

    def _paid_images(self, images: int) -> int:
        """Returns the number of images that the time of a step depends on."""
        return 1 if self._idle_slots_cost else images

    def _ms(self, candidate: _Candidate) -> float:
        """Returns the time of a step of the candidate with as many images in flight as now."""
        return self._times.of(candidate.index, self._paid_images(self._images))

    def _schedule(self) -> None:
        """Chooses the candidate of the next PERIOD steps, or begins a trial of another one if one is due."""
        if self._in_step.is_plain and not self._in_trial and self._in_step.judge():
            # Times of rows far above would mislead, because attention was shorter there.
            self._times = StepTimes([candidate.shape.num_nodes for candidate in self._candidates])
            self._untried = deque(self._candidates)
        self._in_step.update(self._images)
        self._scheduled.clear()
        self._times.fit()
        promised = self._levels.accepted_codes()
        if self._in_step.is_plain:
            chosen = self._candidates[0]
        elif self._untried and self._may_be_best(self._untried[0], promised):
            self._in_trial = False
            self._scheduled.extend(self._trial(self._untried.popleft()))
            return
        else:
            self._untried.clear()
            self._promised = promised
            chosen = max(self._candidates, key=self._rate)
        self._schedule_around(chosen)

    def _schedule_around(self, chosen: _Candidate) -> None:
        """Schedules steps of the chosen candidate, or a trial of another one if one is due."""
        if chosen is not self._chosen:
            self._times.begin(chosen.index)
            self._chosen = chosen
        other = self._least_tried(chosen)
        self._in_trial = other is not None and self._is_due(other)
        if other is not None and self._in_trial:
            # A trial of a candidate without a time does not count: a slow moment might spoil its only one.
            if self._times.is_timed(other.index):
                self._trials += 1
                other.last_trial = self._trials
            self._times.begin_trial(other.index)
            self._scheduled.extend(self._trial(other))
        else:
            self._scheduled.extend([chosen] * PERIOD)

    def _may_be_best(self, candidate: _Candidate, promised: Sequence[float]) -> bool:
        """Returns whether the candidate would be best so far if its steps were as short as those of the next
        smaller one. If not, neither it nor a larger one is worth a first trial, which would take long with
        many images in flight."""
        timed = [c for c in self._candidates if self._times.is_timed(c.index)]
        best = max(((1 + promised[c.shape.depth]) / self._ms(c) for c in timed), default=0.0)
        return not timed or (1 + promised[candidate.shape.depth]) / self._ms(timed[-1]) > best

    def _trial(self, candidate: _Candidate) -> list[_Candidate]:
        """Begins a trial. Returns its steps."""
        self._since_trial_ms = 0.0
        steps = TRIAL_STEPS if self._times.is_timed(0) else PERIOD  # all are compared with plain decoding
        return [candidate] * (self._warm_up_of(candidate) + steps)

    def _warm_up_of(self, candidate: _Candidate) -> int:
        """Returns how many steps of the candidate are not to be counted if it follows the current one."""
        deeper = candidate.shape.depth > self._current.shape.depth
        return WARM_UP if deeper and self._self_drafted else 0

    def _least_tried(self, chosen: _Candidate) -> _Candidate | None:
        """Returns the candidate to try next while `chosen` is the best; None if there is no other."""
        if chosen.shape.depth:
            at = chosen.index
            others = [c for n, c in enumerate(self._candidates) if n == 0 or abs(n - at) == 1]
        else:
            least_depth = EXPLORE_DEPTH if self._self_drafted else 1
            deep = [c for c in self._candidates if c.shape.depth >= least_depth]
            others = deep[:1] or self._candidates[1:][-1:]
        return min(others, key=lambda candidate: candidate.last_trial, default=None)

    def _is_due(self, candidate: _Candidate) -> bool:
        """Returns whether a trial of the candidate is due. While a batch in step decodes plainly, it is if it
        takes at most InStep.share() of the time since the last one. Otherwise it is if the candidate has had
        at most its first trial, or if the time of all trials stays within TRIAL_COST."""
        expected_ms = (self._warm_up_of(candidate) + TRIAL_STEPS) * self._ms(candidate)
        if self._in_step.is_plain:
            return expected_ms <= self._in_step.share() * self._since_trial_ms
        return not candidate.last_trial or self._trial_ms + expected_ms <= TRIAL_COST * self._total_ms

    def _rate(self, candidate: _Candidate) -> float:
        """Returns the codes per millisecond that the candidate is expected to commit. Those of plain decoding
        count less if trials have shown that trees pay in a batch that was in step."""
        promised = self._promised[candidate.shape.depth]
        rate = (1 + candidate.accepts(promised, self._promise_steps)) / self._ms(candidate)
        counts_less = self._images > 1 and not candidate.shape.depth and self._in_step.trees_pay()
        return rate / LEAST_GAIN if counts_less else rate
