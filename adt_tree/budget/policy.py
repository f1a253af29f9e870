"""The policy that sizes trees by what their steps cost and commit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adt_tree.budget.acceptance import MEMORY, Levels, refinement_of
from adt_tree.budget.times import StepTimes
from adt_tree.policy import PLAIN, Policy, TreeShape
from adt_tree.records import Step

PERIOD = 8  # steps from one decision to the next, and counted steps of a trial
# Steps of a first trial. The first step after a change of candidate, or of the number of images, is not
# timed, because it may record graphs.
FIRST_STEPS = 3
# A deeper self-drafted tree reaches positions that no pass has scored, so its first steps accept less than
# later ones: a chain of 15 after one of 7 commits 3.9, 3.3, 3.4, 4.7, 4.3, 4.0 and then 5 (docs/LOG.md). A
# shallower tree accepts more at first, because the deeper one has scored its positions. So the acceptance
# of the first WARM_UP steps after a change of depth is not counted, and a newly chosen candidate is kept for
# STAY periods after them. Their times count: if they were so long that its hoped rate is now less than the
# share LEAST_RATE of a smaller candidate's, it is left after them.
WARM_UP, STAY, LEAST_RATE = 6, 2, 0.9
# A candidate accepts more or fewer codes than its levels promise: it may be wider, nodes may refine more or
# less than assumed, and an inner policy may draft fewer levels than the candidate allows. Its own steps tell,
# but an image's mean of accepted codes varies by a fifth, so the promise counts as much as LEVEL_STEPS image
# steps. With 100 of them a chain of 7 was kept where one of 15 was 15 % faster, because the promise of the
# chain of 15 was too low and outweighed what its own steps had shown (docs/LOG.md).
LEVEL_STEPS = 20.0
# Images that trees put out of step have to wait for the last one before plain decoding is fast again. So a
# self-drafting batch out of step goes back to it only for a gain of WAIT_LOSS codes a step. No image waits
# for one that begins later: images that a trial puts out of step shortly before they end would stay so. So a
# batch in step begins trials only while no image has more than the share TRIAL_PART of its codes.
WAIT_LOSS, TRIAL_PART = 0.15, 0.5
# The codes that n image steps accept are about as uncertain as their mean over the root of n. So a candidate
# is hoped to accept more by DOUBT / sqrt(n + DOUBT_STEPS), where n counts the steps of all trees that were at
# least as deep, for the steps of a deep tree show what a shallow one would accept. So it is used until such
# steps tell what it accepts. A drafter network gets no such credit: whenever trees follow plain decoding, it
# has to read what was decoded since, in a step that is not timed.
DOUBT, DOUBT_STEPS = 1.0, 25.0
# Images that draft get out of step. That costs time which a step does not show: attention over prefixes of
# different lengths takes longer, and slots are idle at the end of a run. With 8 and 16 images in flight trees
# gain 3 and 4.5 % less than their steps promise. So plain decoding counts as faster by a share STEP_LOSS for
# each doubling of the images. That is less than was measured, because mistakes do not last equally
# long: a batch that drafts sees in every step what its trees gain, but one that decodes plainly sees it only
# in trials, and stayed plain where trees were faster (docs/LOG.md). The passes of a drafter network are out
# of step too, so with one plain decoding counts as faster by NETWORK_STEP_LOSS for each image but the first,
# at most by MOST_STEP_LOSS.
STEP_LOSS, NETWORK_STEP_LOSS, MOST_STEP_LOSS = 0.004, 0.125, 0.25
# Times change with the load of the device, and one slow moment can spoil the first trial of a shape, or end
# the first trials too early. So plain decoding and the neighbours of the chosen shape are tried again:
# whichever will have lost least, counted in its own steps, where every trial makes those before it count less
# by TRIAL_MEMORY, as long as all trials lose at most the share TRIAL_LOSS of a run's time. EARLY_STEPS steps
# of the chosen shape count as part of that time from the start, so that early mistakes are soon found. A
# trial of a shape that is nearly as good loses at least LEAST_LOSS of its time. While plain decoding is
# chosen, the tree that seems best is tried.
TRIAL_LOSS, EARLY_STEPS, LEAST_LOSS, TRIAL_MEMORY = 0.005, 500, 0.1, 0.95


@dataclass(slots=True, eq=False)
class _Candidate:
    """A shape, and the acceptance of its steps."""

    index: int  # among the candidates
    shape: TreeShape
    refinement: float  # factor by which it accepts more codes than a smaller tree of as many levels
    accepted: float = 0.0  # codes accepted in its image steps, older ones with less weight
    steps: float = 0.0  # image steps, older ones with less weight
    # Time that its trials are estimated to have lost. Each later trial of any candidate makes it count less.
    lost_ms: float = 0.0

    def count(self, accepted: int) -> None:
        """Adds one step of one image."""
        decay = 1 - 1 / MEMORY
        self.accepted, self.steps = self.accepted * decay + accepted, self.steps * decay + 1


class CostAware:
    """Chooses the shape that commits most codes per second. All images in flight have the same candidate."""

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        positions: int,
        inner: Policy | None = None,
        self_drafted: bool = True,
        idle_slots_cost: bool = False,
    ) -> None:
        """shapes: at least two candidates, the first of them plain decoding. positions: number of codes of an
        image. inner: chooses depth and width within the candidate that is taken; None: the candidate is the
        shape. self_drafted: drafts come from earlier passes of the target, so that they depend on the trees
        of these passes. idle_slots_cost: a step takes equally long whatever number of slots hold images, or
        take part in it."""
        self._candidates = [
            _Candidate(index, shape, refinement_of(shape.num_nodes) if self_drafted else 1.0)
            for index, shape in enumerate(shapes)
        ]
        self._positions, self._inner = positions, inner
        self._self_drafted, self._idle_slots_cost = self_drafted, idle_slots_cost
        self._current = self._candidates[0]
        self._chosen: _Candidate | None = None  # by the last choice; None during the first trials
        self._is_warming_up = False  # whether the first WARM_UP steps of the chosen candidate are scheduled
        # Steps since the candidate or the number of images changed: 0 at the first of them, -1 before it.
        self._in_a_row = -1
        self._settled = 0  # steps since the depth of the trees changed
        self._scheduled = deque[_Candidate]()  # candidates of the next steps
        self._untried = deque(self._candidates)  # candidates whose first trial is to come, smallest first
        # Time of all steps, and what trials, and images that waited after them, have lost of it.
        self._total_ms, self._lost_ms = 0.0, 0.0
        self._step_loss_ms = 0.0  # what each step of the last trial was estimated to lose
        # Whether the last trees were those of a trial, and not of a choice that plain decoding has replaced.
        self._is_after_trial = False
        self._times = StepTimes([shape.num_nodes for shape in shapes])
        self._levels = Levels(max(shape.depth for shape in shapes))
        self._promised: list[float] = []  # accepted codes by candidate, at the last choice
        self._shapes: Mapping[int, TreeShape] = {}  # of the present step, by slot
        self._in_flight = 0  # number of images in flight
        self._images = 0  # in the last step that was scheduled
        self._furthest = 0  # the position of the root that is furthest in its image
        self._are_equal = False  # whether all images are equally far
        # Whether no image has begun since all were equally far, or since plain decoding was chosen.
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
        self._in_flight = len(roots)
        self._furthest = max(roots.values())
        self._are_equal = len({*roots.values()}) == 1
        behind = self._behind(roots)
        # A step without trees for all images follows those in which some waited.
        self._is_extra = bool(behind) or (self._has_waited and any(roots.values()))
        self._has_waited = bool(behind)
        if self._is_extra:
            return dict.fromkeys(behind or roots, PLAIN)
        self._next_step()
        limit = self._current.shape
        # The inner policy is not asked for trees that are not drafted, because each answer moves its state.
        if self._inner is None or not limit.depth:
            self._shapes = dict.fromkeys(roots, limit)
        else:
            self._shapes = {
                slot: TreeShape(min(shape.depth, limit.depth), min(shape.width, limit.width), limit.budget)
                for slot, shape in self._inner.shapes(roots).items()
            }
        return self._shapes

    def _behind(self, roots: Mapping[int, int]) -> list[int]:
        """Returns the last images of a batch that trees have put out of step, if it decodes plainly again.
        They alone take part in the next step, so that the batch gets in step. The step is shorter without the
        images that wait."""
        last = min(roots.values())
        behind = [slot for slot, root in roots.items() if root == last]
        if len(behind) == len(roots):
            self._may_wait = True
            return []
        plain = self._candidates[0]
        is_plain = self._chosen is plain and self._scheduled and self._scheduled[0] is plain
        return behind if is_plain and self._is_batch and self._may_wait else []

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Counts what the images accepted, and the time of the step unless all trees were cut by the end of
        their images."""
        if self._inner is not None:
            self._inner.observe(steps)
        if not steps:
            return
        ms = next(iter(steps.values())).ms  # all images in flight share the step's time
        self._total_ms += ms
        if self._is_extra:
            if self._is_after_trial:
                self._lost_ms += ms * (1 - len(steps) / self._in_flight)
            return
        is_trial = self._chosen not in (None, self._current)
        # Plain steps of images out of step. Were plain decoding chosen, its images would get in step, and its
        # steps would become shorter.
        is_longer = is_trial and self._is_batch and not (self._current.shape.depth or self._are_equal)
        # The drafter network reads all codes that were decoded without it.
        reads_all = is_trial and not (self._in_a_row or self._self_drafted)
        if is_longer or reads_all:
            usual_ms = self._ms(self._current)
            # Once only, a step may also take very long because it records graphs.
            excess_ms = max(0.0, min(ms - usual_ms, PERIOD * usual_ms))
            self._lost_ms += excess_ms
            self._current.lost_ms += excess_ms
        if self._in_a_row and any(step.depth == self._shapes[slot].depth for slot, step in steps.items()):
            progress = sum(step.position for step in steps.values()) / len(steps) / self._positions - 0.5
            add = self._times.bound if is_longer else self._times.add
            add(self._current.index, self._paid_images, ms, progress)
        if self._current.shape.depth and (self._settled >= WARM_UP or not self._self_drafted):
            for step in steps.values():
                self._levels.count(step.depth, step.accepted, self._current.refinement)
                self._current.count(step.accepted)

    def _next_step(self) -> None:
        if self._images != self._in_flight:
            before, self._images = self._paid_images, self._in_flight
            if self._paid_images != before:
                self._end_trial()
                if self._times.is_new(self._paid_images):
                    self._begin_first_trials()
                elif self._paid_images >= 2 * before and self._chosen is not None:
                    # What was chosen for the last image of a batch may be far too large for the next batch.
                    self._scheduled.clear()
                    self._is_warming_up = False
        if not self._scheduled:
            self._schedule()
        upcoming = self._scheduled.popleft()
        self._in_a_row = self._in_a_row + 1 if upcoming is self._current else 0
        self._settled = self._settled + 1 if upcoming.shape.depth == self._current.shape.depth else 0
        self._current = upcoming

    def _end_trial(self) -> None:
        """Ends a trial, if there is one, because the times after a change of the number of images cannot be
        compared with those before it. Steps that do not run lose nothing."""
        self._in_a_row = -1
        if self._chosen and self._current is not self._chosen:
            refund_ms = len(self._scheduled) * self._step_loss_ms
            self._lost_ms -= refund_ms
            self._current.lost_ms -= refund_ms
            self._scheduled = deque([self._chosen] * PERIOD)

    def _begin_first_trials(self) -> None:
        """Begins first trials anew, because times with far fewer images in flight say too little."""
        self._untried = deque(self._candidates)
        self._scheduled.clear()
        self._chosen = None

    @property
    def _paid_images(self) -> int:
        """The number of images that the time of a step depends on."""
        return 1 if self._idle_slots_cost else self._images

    def _ms(self, candidate: _Candidate) -> float:
        """Returns the time of a step of the candidate with as many images in flight as now."""
        return self._times.of(candidate.index, self._paid_images)

    def _schedule(self) -> None:
        """Chooses the candidate of the next PERIOD steps, or begins a trial of another one if one is due."""
        codes = self._levels.accepted_codes()
        self._promised = [min(c.shape.depth, codes[c.shape.depth] * c.refinement) for c in self._candidates]
        if self._untried and self._may_be_best(self._untried[0]):
            # Plain decoding, with which all others are compared, is tried for longer.
            untried = self._untried.popleft()
            self._scheduled.extend([untried] * (FIRST_STEPS if untried.index else PERIOD))
        elif math.isinf(self._ms(self._candidates[0])):  # all steps failed, or images changed at each of them
            self._scheduled.extend([self._candidates[0]] * PERIOD)
        else:
            self._untried.clear()
            chosen, has_warmed_up, self._is_warming_up = self._chosen, self._is_warming_up, False
            if chosen and has_warmed_up and self._keeps_up(chosen):
                self._scheduled.extend([chosen] * STAY * PERIOD)
            else:
                self._schedule_around(max(self._candidates, key=self._hoped_rate))

    @property
    def _is_batch(self) -> bool:
        """Whether there are so many images that it pays to let some wait for others."""
        return self._in_flight > 2 and not self._idle_slots_cost

    def _may_be_best(self, candidate: _Candidate) -> bool:
        """Returns whether the candidate would be best so far if its steps were as short as those of the next
        smaller one. If not, neither it nor a larger one is worth a first trial, which would take long with
        many images in flight."""
        if not candidate.index:
            return True
        ms = self._ms(self._candidates[candidate.index - 1])
        return self._hoped_codes(candidate) / ms > self._best_rate(candidate.index)

    def _keeps_up(self, candidate: _Candidate) -> bool:
        """Returns whether the candidate is hoped to be nearly as fast as every smaller one, or faster."""
        return self._hoped_rate(candidate) >= LEAST_RATE * self._best_rate(candidate.index)

    def _best_rate(self, count: int) -> float:
        """Returns the greatest hoped rate of the `count` smallest candidates."""
        return max(map(self._hoped_rate, self._candidates[:count]))

    def _schedule_around(self, chosen: _Candidate) -> None:
        """Schedules steps of the chosen candidate, or a trial of another one if one is due."""
        if chosen is not self._chosen:
            self._chosen = chosen
            if chosen.shape.depth:
                self._is_after_trial = False
                warm_up = self._warm_up_of(chosen)
                self._is_warming_up = warm_up > 0
                self._scheduled.extend([chosen] * (warm_up or STAY * PERIOD))
                return
            self._may_wait = True
        other = self._least_tried(chosen)
        loss_ms = self._loss_ms(other, chosen)
        # The times of the chosen candidate, with which those of the trial are compared, must be recent ones,
        # with as many images in flight.
        is_comparable = self._current is chosen and self._in_a_row >= PERIOD - 1
        is_late = self._is_batch and self._are_equal and self._furthest > TRIAL_PART * self._positions
        credited_ms = self._total_ms + EARLY_STEPS * self._ms(chosen)
        if is_comparable and not is_late and self._lost_ms + loss_ms <= TRIAL_LOSS * credited_ms:
            self._is_after_trial = not chosen.shape.depth
            self._lost_ms += loss_ms
            self._step_loss_ms = loss_ms / self._steps_of_trial(other, chosen)
            for candidate in self._candidates:
                candidate.lost_ms *= TRIAL_MEMORY
            other.lost_ms += loss_ms
            self._scheduled.extend([other] * (self._warm_up_of(other) + PERIOD))
        else:
            self._scheduled.extend([chosen] * PERIOD)

    def _warm_up_of(self, candidate: _Candidate) -> int:
        """Returns how many steps of the candidate are not to be counted if it follows the current one."""
        changes = candidate.shape.depth not in (0, self._current.shape.depth)
        return WARM_UP if changes and self._self_drafted else 0

    def _least_tried(self, chosen: _Candidate) -> _Candidate:
        """Returns the candidate to try next while `chosen` is the best."""
        at = chosen.index
        if not at:
            return max(self._candidates[1:], key=self._hoped_rate)
        others = [c for n, c in enumerate(self._candidates) if n == 0 or abs(n - at) == 1]
        if not self._self_drafted:  # plain decoding first, because its first steps may have been slow ones
            return min(others, key=lambda c: c.lost_ms)
        # In milliseconds a trial of the larger neighbour would seem to lose more just because its steps are
        # longer, and a better tree might never be tried.
        return min(others, key=lambda c: (c.lost_ms + self._loss_ms(c, chosen)) / self._ms(c))

    def _loss_ms(self, candidate: _Candidate, chosen: _Candidate) -> float:
        """Returns the time that a trial of the candidate is expected to lose."""
        loss = 1 - self._rate(candidate) / self._rate(chosen)
        return self._steps_of_trial(candidate, chosen) * self._ms(candidate) * max(LEAST_LOSS, loss)

    def _steps_of_trial(self, candidate: _Candidate, chosen: _Candidate) -> int:
        """Returns the number of steps that a trial of the candidate makes slower: its own, and those in which
        trees warm up after it."""
        depths = candidate.shape.depth, chosen.shape.depth
        warm_ups = sum(map(bool, depths)) if self._self_drafted and depths[0] != depths[1] else 0
        return PERIOD + WARM_UP * warm_ups

    def _accepts(self, candidate: _Candidate) -> float:
        """Returns the number of codes that a step of the candidate is expected to accept."""
        promised = LEVEL_STEPS * self._promised[candidate.index]
        return (candidate.accepted + promised) / (candidate.steps + LEVEL_STEPS)

    def _rate(self, candidate: _Candidate) -> float:
        """Returns the codes per millisecond that the candidate is expected to commit."""
        return (1 + self._accepts(candidate)) / self._ms(candidate)

    def _hoped_codes(self, candidate: _Candidate) -> float:
        """Returns the codes that a step of the candidate is hoped to commit; for plain decoding, the codes
        that a tree of equal time must commit to be better."""
        if not candidate.shape.depth:
            if not self._self_drafted:
                return 1 + min(NETWORK_STEP_LOSS * (self._images - 1), MOST_STEP_LOSS)
            codes = 1 + STEP_LOSS * math.log2(self._images)
            if self._is_batch and not self._are_equal and self._chosen and self._chosen.shape.depth:
                codes -= WAIT_LOSS
            return codes
        depth, hope = candidate.shape.depth, 1.0
        if self._self_drafted:
            hope += DOUBT / math.sqrt(self._levels.steps(depth) + DOUBT_STEPS)
        return 1 + min(depth, hope * self._accepts(candidate))

    def _hoped_rate(self, candidate: _Candidate) -> float:
        """Returns the codes per millisecond that decide which candidate is chosen."""
        return self._hoped_codes(candidate) / self._ms(candidate)
