"""Whether a batch whose images are in step goes on decoding plainly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import mean, median

from adt_tree.records import Step

# Images that draft get out of step. That costs time which a trial does not show: attention over prefixes of
# different lengths takes longer, and at the end of a run slots are idle (docs/LOG.md). So a tree must commit
# at least LEAST_GAIN times the codes per second of plain decoding. With fewer than LEAST_IMAGES images the
# cost is small, and they need not stay in step.
LEAST_GAIN, LEAST_IMAGES = 1.25, 3
# All images are in the same rows, and in some rows more drafts are right than in others. So trees are taken
# after LEAST_TRIALS at the earliest. MOST_TRIALS are remembered.
LEAST_TRIALS, MOST_TRIALS = 3, 16
# The first LEAST_TRIALS, and up to EARLY_TRIALS while the gain is at least HOPE, take at most the share
# EARLY_COST of the time, and later ones the share LATE_COST. A trial costs more than its own time: the images
# remain out of step until they have ended, and a run ends with the slowest of them.
EARLY_COST, EARLY_TRIALS, HOPE, LATE_COST = 0.2, 8, 1.05, 0.003
RECENT_STEPS = 8  # number of plain steps, before a trial and after it, with which it is compared


class Trials:
    """The last trials with one number of images in flight."""

    def __init__(self) -> None:
        # Of each trial: the mean number of codes that a step of an image committed, and the time of a plain
        # step divided by that of a step with trees.
        self._codes, self._speed = (deque[float](maxlen=MOST_TRIALS) for _ in range(2))

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, codes: float, speed: float) -> None:
        self._codes.append(codes)
        self._speed.append(speed)

    @property
    def gain(self) -> float:
        """The codes per second of the tree, relative to plain decoding. The codes differ from row to row, so
        their mean counts. The speeds differ less, but now and then the device is slow for a moment; hence the
        median."""
        return mean(self._codes) * median(self._speed)


class InStep:
    """Decides for plain decoding or for trees while the images of a batch are in step.

    The images of a batch begin together, and under plain decoding they stay in step. From time to time a tree
    is tried and compared with the plain steps just before it and just after. Trials are kept by number of
    images, because the more there are, the more the rows of a tree cost.
    """

    def __init__(self) -> None:
        self.is_plain = False  # true while a batch in step decodes plainly
        self._images = 0  # number of images in flight
        self._trials = defaultdict[int, Trials](Trials)  # by number of images
        self._plain_ms = deque[float](maxlen=2 * RECENT_STEPS)
        self._tree_ms: list[float] = []  # times of the counted steps of the last trial
        self._codes: list[int] = []  # number of codes that each image committed in each of these steps

    def share(self) -> float:
        """Returns the share of the time that trials may take at present."""
        if len(self._plain_ms) < RECENT_STEPS:
            return 0.0
        trials = self._trials[self._images]
        is_early = len(trials) < LEAST_TRIALS or (len(trials) < EARLY_TRIALS and trials.gain >= HOPE)
        return EARLY_COST if is_early else LATE_COST

    def begin(self, images: int) -> None:
        """Starts a batch, whose images have all just begun."""
        self._images = images
        self._forget()
        self.is_plain = images >= LEAST_IMAGES and not self.trees_pay()

    def update(self, images: int) -> None:
        """Says how many images are in flight. A few need not stay in step."""
        if images != self._images:
            self._images = images
            self._forget()
        self.is_plain &= images >= LEAST_IMAGES

    def _forget(self) -> None:
        """Forgets the last steps, because the next ones cannot be compared with them."""
        self._plain_ms.clear()
        self._tree_ms, self._codes = [], []

    def add(self, steps: Sequence[Step], ms: float) -> None:
        """Adds one step of some or all images in flight, at least one, which took ms."""
        if steps[0].depth:
            self._tree_ms.append(ms)
            self._codes.extend(step.accepted + 1 for step in steps)
        else:
            self._plain_ms.append(ms)

    def judge(self) -> bool:
        """Counts the last trial, if there was one, once plain steps have followed it. Returns whether this
        ends plain decoding."""
        if self._tree_ms and len(self._plain_ms) == 2 * RECENT_STEPS:
            speed = median(self._plain_ms) / median(self._tree_ms)
            self._trials[self._images].add(mean(self._codes), speed)
            self._tree_ms, self._codes = [], []
            self.is_plain = not self.trees_pay()
            return not self.is_plain
        return False

    def trees_pay(self) -> bool:
        """Returns whether trials with as many images, or more, have shown that trees pay."""
        return any(
            len(trials) >= LEAST_TRIALS and trials.gain >= LEAST_GAIN
            for images, trials in self._trials.items()
            if images >= self._images
        )
