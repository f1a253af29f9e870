"""Whether a batch whose images began together decodes plainly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
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
DOUBT = 0.7
MOST_TRIALS = 16  # number of trials that are remembered
# The counted steps of early trials take at most the share EARLY_COST of the time of plain steps. After
# EARLY_TRIALS trials, or after LEAST_TRIALS without hope, the share is LATE_COST, because every trial loses
# time: its first steps accept less, and after it the images get in step again, or stay out of step. There is
# no hope while the gain is below the share HOPE of the least gain. Here the codes that the growth law
# promises count as one more trial, because poor rows should not end hope.
EARLY_COST, EARLY_TRIALS, LEAST_TRIALS, HOPE, LATE_COST = 1.0, 10, 2, 0.9, 0.01


class InStep:
    """Decides for plain decoding or for trees in a batch whose images began together.

    Under plain decoding they stay in step. From time to time a tree is tried. What decides is its gain, the
    ratio of its codes per second to those of the PERIOD plain steps before it and after it. Trials are kept
    by number of images, because the more there are, the more the rows of a tree cost.
    """

    def __init__(self, self_drafted: bool = True) -> None:
        """self_drafted: trees are drafted without a network."""
        self._self_drafted = self_drafted
        self.is_plain = False  # true while a batch that began together decodes plainly
        self._images = 0  # number of images in flight
        # For each number of images, its trials: codes per image and step, and the time of a plain step over
        # that of a tree's step.
        self._trials = defaultdict[int, deque[tuple[float, float]]](partial(deque, maxlen=MOST_TRIALS))
        self._plain_ms = deque[float](maxlen=2 * PERIOD)
        # Time of the counted steps of the last trial that was judged, or of all steps of a longer one that
        # was cut since.
        self._trial_ms = 0.0
        self._drafting_ms = 0.0  # time of all steps of a trial that is not judged yet
        self._since_trial_ms = 0.0  # time of the plain steps since the last trial
        self._tree_ms: list[float] = []  # times of the counted steps of the last trial
        self._codes: list[int] = []  # number of codes that each image committed in each of these steps
        self._law_codes = 0.0  # number of codes that one of these steps commits by the growth law

    def is_due(self) -> bool:
        """Returns whether a trial may begin: there are plain steps to compare it with, and the last trial
        took at most share() of their time since."""
        is_comparable = len(self._plain_ms) >= PERIOD and self._since_trial_ms > 0
        return is_comparable and self._trial_ms <= self.share() * self._since_trial_ms

    def share(self) -> float:
        """Returns the time that trials may take at present, as a share of that of plain steps."""
        trials = self._trials[self._images]
        least = HOPE * self.least_gain()
        is_hopeless = len(trials) >= LEAST_TRIALS and _gain(trials, [self._law_codes]) < least
        return LATE_COST if is_hopeless or len(trials) >= EARLY_TRIALS else EARLY_COST

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
        """Forgets the last steps, because the next ones cannot be compared with them. The time of a trial
        that is cut counts nevertheless, or else trials that are always cut would follow one another."""
        self._trial_ms, self._drafting_ms = max(self._trial_ms, self._drafting_ms), 0.0
        self._plain_ms.clear()
        self._tree_ms, self._codes = [], []

    def add(self, depth: int, steps: Sequence[Step], ms: float) -> None:
        """Adds a step, which took `ms` milliseconds.

        depth: levels of its trees; 0 for a plain step. steps: the records that count. They leave out images
        whose trees were cut, and there are none while trees warm up.
        """
        if not depth:
            self._plain_ms.append(ms)
            self._since_trial_ms += ms
            return
        self._since_trial_ms = 0.0
        self._drafting_ms += ms
        if steps:
            self._law_codes = 1 + mean(law(step.depth) for step in steps)
            self._tree_ms.append(ms)
            self._codes.extend(step.accepted + 1 for step in steps)

    def judge(self) -> bool:
        """Counts the last trial, if there was one, once plain steps have followed it. Returns whether this
        ends plain decoding."""
        if self._tree_ms and self._since_trial_ms and len(self._plain_ms) == 2 * PERIOD:
            tree_ms = median(self._tree_ms)
            self._trials[self._images].append((mean(self._codes), median(self._plain_ms) / tree_ms))
            self._trial_ms, self._drafting_ms = len(self._tree_ms) * tree_ms, 0.0
            self._tree_ms, self._codes = [], []
            self.is_plain = not self.trees_pay()
            return not self.is_plain
        return False

    def least_gain(self) -> float:
        """Returns the gain from which trees pay with so many images in flight."""
        return 1 + (min(LOSS_PER_IMAGE * self._images, MOST_LOSS) if self._self_drafted else MOST_LOSS)

    def trees_pay(self) -> bool:
        """Returns whether trials with as many images, or more, have shown that trees pay."""
        return any(
            _gain(trials) >= max(self.least_gain(), 1 + DOUBT / len(trials))
            for images, trials in self._trials.items()
            if images >= self._images and trials
        )


def _gain(trials: Collection[tuple[float, float]], promised: Sequence[float] = ()) -> float:
    """Returns the gain that trials show together. A slow moment spoils the speed of one trial, so the median
    of the speeds counts. Codes differ from row to row, so their mean counts. promised: numbers of codes that
    count like those of trials."""
    codes, speeds = zip(*trials, strict=True)
    return mean((*codes, *promised)) * median(speeds)
