"""What a run leaves behind: one Step per target call and image, one Decoded per image. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One target call of one image: a line of steps.jsonl."""

    position: int  # of the first code the step committed
    row: int
    column: int
    depth: int  # levels of the tree asked for; 0 in the AR baseline
    width: int
    nodes: int  # drafted nodes scored, root excluded
    accepted: int  # draft codes accepted; the step committed one more
    ms: float  # wall clock of the step, shared by all images in flight
    top1: list[float] = field(default_factory=list)  # probability of the likeliest code, by position


@dataclass(slots=True)
class Decoded:
    """One image, finished or on its way."""

    name: str
    seed: int
    codes: list[int]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # wall clock from prefill to the last code
    target_calls: int = 0  # passes over the image's codes, the prompt's prefill excluded
    drafter_calls: int = 0

    @property
    def tau(self) -> float:
        """Codes committed per target call: mean of accepted + 1 over steps."""
        return _mean([step.accepted + 1 for step in self.steps])

    @property
    def mean_depth(self) -> float:
        """Mean tree depth in levels."""
        return _mean([step.depth for step in self.steps])

    @property
    def mean_nodes(self) -> float:
        """Mean drafted nodes per target call."""
        return _mean([step.nodes for step in self.steps])


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
