"""Whether a batch whose images are in step goes on decoding plainly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from statistics import mean, median

from adt_tree.records import Step

# Images that draft get out of step. That costs time which a trial does not show: attention over prefixes of
# different lengths takes longer, and at the end of a run slots are idle (docs/LOG.md). So a tree must commit
# at least LEAST_GAIN times the codes per second of plain decoding.
LEAST_GAIN = 1.2
# All images are in the same rows, and in some rows more drafts are right than in others. The device may also
# be slow for a moment. So what counts is the median of trials, which are made at several rows. A gain that
# few trials show must be larger: after n trials at least 1 + 1 / n.
MOST_GAINS = 16  # number of trials that are remembered
# Early trials take at most the share EARLY_COST of the time, until there were EARLY_TRIALS, or LEAST_TRIALS
# whose median is a loss. Later ones take the share LATE_COST, because one trial leaves the images of a batch
# out of step until they have ended.
EARLY_COST, EARLY_TRIALS, LEAST_TRIALS, LATE_COST = 0.2, 8, 3, 0.001
RECENT_STEPS = 8  # number of plain steps, before a trial and after it, with which it is compared


class InStep:
    """Decides for plain decoding or for trees while the images of a batch are in step.

    The images of a batch begin together, and under plain decoding they stay in step. From time to time a tree
    is tried. What decides is its gain, the ratio of its codes per second to those of the plain steps just
    before it and just after. Gains are kept by number of images, because the more there are, the more the
    rows of a tree cost.
    """

    def __init__(self) -> None:
        self.is_plain = False  # true while a batch in step decodes plainly
        self._images = 0  # number of images in flight
        self._gains = defaultdict[int, deque[float]](partial(deque, maxlen=MOST_GAINS))  # by images
        self._plain_ms = deque[float](maxlen=2 * RECENT_STEPS)
        self._tree_ms: list[float] = []  # times of the counted steps of the last trial
        self._codes: list[int] = []  # number of codes that each image committed in each of these steps

    def share(self) -> float:
        """Returns the share of the time that trials may take at present."""
        if len(self._plain_ms) < RECENT_STEPS:
            return 0.0
        gains = self._gains[self._images]
        is_loss = len(gains) >= LEAST_TRIALS and median(gains) < 1
        return LATE_COST if is_loss or len(gains) >= EARLY_TRIALS else EARLY_COST

    def begin(self, images: int) -> None:
        """Starts a batch, whose images have all just begun."""
        self._images = images
        self._forget()
        self.is_plain = images > 1 and not self.trees_pay()

    def update(self, images: int) -> None:
        """Says how many images are in flight. A single one need not stay in step."""
        if images != self._images:
            self._images = images
            self._forget()
        self.is_plain &= images > 1

    def _forget(self) -> None:
        """Forgets the last steps, because the next ones cannot be compared with them."""
        self._plain_ms.clear()
        self._tree_ms, self._codes = [], []

    def add(self, steps: Sequence[Step], ms: float) -> None:
        """Adds a step, which took `ms` milliseconds. steps: its records of the images whose trees were not
        cut, at least one."""
        if steps[0].depth:
            self._tree_ms.append(ms)
            self._codes.extend(step.accepted + 1 for step in steps)
        else:
            self._plain_ms.append(ms)

    def judge(self) -> bool:
        """Counts the gain of the last trial, if there was one, once plain steps have followed it. Returns
        whether this ends plain decoding."""
        if self._tree_ms and len(self._plain_ms) == 2 * RECENT_STEPS:
            speed = median(self._plain_ms) / median(self._tree_ms)
            self._gains[self._images].append(mean(self._codes) * speed)
            self._tree_ms, self._codes = [], []
            self.is_plain = not self.trees_pay()
            return not self.is_plain
        return False

    def trees_pay(self) -> bool:
        """Returns whether trials with as many images, or more, have shown that trees pay."""
        return any(
            median(gains) >= max(LEAST_GAIN, 1 + 1 / len(gains))
            for images, gains in self._gains.items()
            if images >= self._images and gains
        )
