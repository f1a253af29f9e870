"""What a run leaves behind: one Step a cycle and image, one Decoded an image."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One cycle of one image."""

    position: int  # of the first code the cycle committed
    row: int
    column: int
    depth: int  # levels of the tree asked for; 0 in plain AR
    width: int
    nodes: int  # drafted nodes scored, root excluded
    accepted: int  # draft codes accepted; the cycle committed one more
    ms: float  # wall clock of the cycle, shared by all images in flight


@dataclass(slots=True)
class Decoded:
    """One finished image."""

    name: str
    seed: int
    codes: list[int]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # wall clock from prefill to the last code
    target_calls: int = 0  # passes over the image's codes, the prompt's prefill excluded
    drafter_calls: int = 0

    @property
    def tau(self) -> float:
        """Codes committed a target call: mean of accepted + 1 over cycles."""
        return _mean([step.accepted + 1 for step in self.steps])

    @property
    def mean_depth(self) -> float:
        """Mean tree depth in levels."""
        return _mean([step.depth for step in self.steps])

    @property
    def mean_nodes(self) -> float:
        """Mean drafted nodes a cycle."""
        return _mean([step.nodes for step in self.steps])


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
