"""Whether a batch whose images began together decodes plainly."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

from adt_tree.budget.acceptance import law
from adt_tree.budget.times import PERIOD
from adt_tree.records import Step

# Images that draft get out of step. That costs time which a trial does not show: attention over prefixes of
# different lengths takes longer, and at the end of a run slots are idle. The more images there are, the more
# it costs (docs/LOG.md). So a self-drafted tree must gain 1 + LOSS_PER_IMAGE times the number of images, but
# at most 1 + MOST_LOSS. A drafter network, whose own passes are out of step too, must always gain that. Two
# images lose little, so up to FREE_IMAGES may draft at once.
LOSS_PER_IMAGE, MOST_LOSS, FREE_IMAGES = 0.015, 0.25, 2
# All images are in the same rows, and in some rows more drafts are right than in others. The device may also
# be slow for a moment. So what counts is the gain of several trials, which are made at several rows. A gain
# that few trials show must be larger: after n trials at least 1 + DOUBT / n.
DOUBT = 0.5
MOST_TRIALS = 16  # number of trials that are remembered
# Early trials take at most EARLY_COST times as long as the plain steps between them. After EARLY_TRIALS
# trials, or twice as many with those that were cut, or after LEAST_TRIALS without hope, the factor is
# LATE_COST, because every trial loses time: its first steps accept less, and after it the images get in step
# again, or stay out of step. There is no hope while the gain is below the share HOPE of the least gain. Here
# the codes that the growth law promises count as one more trial, because poor rows should not end hope.
EARLY_COST, EARLY_TRIALS, LEAST_TRIALS, HOPE, LATE_COST = 2.0, 10, 2, 0.9, 0.02


@dataclass(frozen=True, slots=True)
class _Trial:
    """The steps of a trial, and of larger trees that were timed with it."""

    depth: int  # levels of the tree that was tried
    accepted: float  # codes that its step accepted of an image, on average
    by_law: float  # codes that it would have accepted by the growth law
    speeds: Mapping[int, float]  # time of a plain step over that of a tree's step, by the tree's levels

    def codes(self, depth: int, with_law: bool = False) -> float:
        """Returns the codes that a step of a tree with so many levels commits: those of the tree that was
        tried, and as many more as the growth law says. with_law: the codes of the tree that was tried come
        from the law as well, not from its steps."""
        accepted = self.by_law if with_law else self.accepted
        return 1 + accepted * law(depth) / law(self.depth)


class InStep:
    """Decides for plain decoding or for trees in a batch whose images began together.

    Under plain decoding they stay in step. From time to time a tree is tried, and larger ones are timed. What
    decides is the gain of the best of them, the ratio of its codes per second to those of the PERIOD plain
    steps before the trial and after it. Trials are kept by number of images, because the more there are, the
    more the rows of a tree cost.
    """

    def __init__(self, self_drafted: bool = True) -> None:
        """self_drafted: trees are drafted without a network."""
        self._self_drafted = self_drafted
        self.is_plain = False  # true while a batch that began together decodes plainly
        self._images = 0  # number of images in flight
        self._trials = defaultdict[int, deque[_Trial]](partial(deque, maxlen=MOST_TRIALS))  # by images
        self._begun = Counter[int]()  # number of trials, judged or not, by number of images
        self._plain_ms = deque[float](maxlen=2 * PERIOD)
        self._trial_ms = 0.0  # time of the last trial
        self._since_trial_ms = 0.0  # time of the plain steps since then
        # Of a trial that is not judged yet: its depth, the number of its steps and the times of those that
        # are timed, by levels of their trees, and the records of its counted steps.
        self._depth, self._numbers, self._tree_ms = 0, Counter[int](), defaultdict[int, list[float]](list)
        self._steps: list[Step] = []

    def is_due(self) -> bool:
        """Returns whether a trial may begin: there are plain steps to compare it with, and those since the
        last trial took long enough."""
        is_comparable = len(self._plain_ms) >= PERIOD and self._since_trial_ms > 0
        return is_comparable and self._trial_ms <= self.cost() * self._since_trial_ms

    def cost(self) -> float:
        """Returns the time that trials may take at present, over that of the plain steps between them."""
        trials = self._trials[self._images]
        least = HOPE * self.least_gain()
        is_hopeless = len(trials) >= LEAST_TRIALS and max(gain for gain, _ in _gains(trials, True)) < least
        is_late = len(trials) >= EARLY_TRIALS or self._begun[self._images] >= 2 * EARLY_TRIALS
        return LATE_COST if is_hopeless or is_late else EARLY_COST

    def begin(self, images: int) -> None:
        """Starts a batch, whose images have all just begun."""
        self._images = images
        self._forget()
        self.is_plain = images > FREE_IMAGES and not self.trees_pay()

    def update(self, images: int) -> None:
        """Says how many images are in flight. Few of them need not stay in step."""
        if images != self._images:
            self._images = images
            self._forget()
        self.is_plain &= images > FREE_IMAGES

    def _forget(self) -> None:
        """Forgets the last steps, because the next ones cannot be compared with them. A trial that is cut has
        taken its time nevertheless."""
        self._plain_ms.clear()
        self._forget_trial()

    def _forget_trial(self) -> None:
        self._numbers.clear()
        self._tree_ms.clear()
        self._steps.clear()

    def add(self, depth: int, steps: Sequence[Step], ms: float, timed: bool = True) -> None:
        """Adds a step, which took `ms` milliseconds.

        depth: levels of its trees; 0 for a plain step. steps: the records of a trial's tree that count. They
        leave out images whose trees were cut, and there are none while trees warm up, nor for larger trees.
        timed: the time of the step counts; always true of a plain step.
        """
        if not depth:
            self._plain_ms.append(ms)
            self._since_trial_ms += ms
            return
        if self._since_trial_ms:
            self._begun[self._images] += 1
            self._trial_ms = self._since_trial_ms = 0.0
            self._forget_trial()  # the last one, if it was not judged because all its trees were cut
        self._trial_ms += ms
        self._numbers[depth] += 1
        if timed:
            self._tree_ms[depth].append(ms)
        if steps:
            self._depth = depth
            self._steps.extend(steps)

    def judge(self) -> bool:
        """Counts the last trial, if there was one, once plain steps have followed it. Returns whether this
        ends plain decoding."""
        was_tried = bool(self._steps and self._tree_ms and self._since_trial_ms)
        if was_tried and len(self._plain_ms) == 2 * PERIOD:
            plain_ms = median(self._plain_ms)
            tree_ms = {depth: median(times_ms) for depth, times_ms in self._tree_ms.items()}
            accepted = mean(step.accepted for step in self._steps)
            by_law = mean(law(step.depth) for step in self._steps)
            speeds = {depth: plain_ms / ms for depth, ms in tree_ms.items()}
            self._trials[self._images].append(_Trial(self._depth, accepted, by_law, speeds))
            # A slow moment in a trial should not put off the next one.
            self._trial_ms = sum(ms * self._numbers[depth] for depth, ms in tree_ms.items())
            self._forget_trial()
            self.is_plain = not self.trees_pay()
            return not self.is_plain
        return False

    def least_gain(self) -> float:
        """Returns the gain from which trees pay with so many images in flight."""
        return 1 + (min(LOSS_PER_IMAGE * self._images, MOST_LOSS) if self._self_drafted else MOST_LOSS)

    def trees_pay(self) -> bool:
        """Returns whether trials with as many images, or more, have shown that trees pay."""
        return any(
            gain >= max(self.least_gain(), 1 + DOUBT / number)
            for images, trials in self._trials.items()
            if images >= self._images
            for gain, number in _gains(trials)
        )


def _gains(trials: Sequence[_Trial], with_law: bool = False) -> list[tuple[float, int]]:
    """Returns the gain of each tree that trials show together, and the number of trials that have timed it.

    A slow moment spoils the speed of one trial, so the median of the speeds counts. Codes differ from row to
    row, so their mean counts. with_law: the codes that the growth law promises count as one more trial."""
    gains = []
    for depth in {depth for trial in trials for depth in trial.speeds}:
        codes = [trial.codes(depth) for trial in trials] + [trials[-1].codes(depth, True)] * with_law
        speeds = [trial.speeds[depth] for trial in trials if depth in trial.speeds]
        gains.append((mean(codes) * median(speeds), len(speeds)))
    return gains
