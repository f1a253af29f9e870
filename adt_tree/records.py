"""Records of decoding: a Step for every target call of an image, a Decoded for every image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One target call of one image."""

    position: int  # of the first cell that the step committed; row ends are cells, too
    row: int  # of that position, in the raster
    column: int  # the width of the raster for a row end
    depth: int  # levels of the tree that the policy asked for; 0 in the AR baseline
    width: int  # most children of a node of that tree
    nodes: int  # drafted nodes that the target scored; the root is not counted
    accepted: int  # drafted cells that were accepted; the step committed one cell more
    ms: float  # wall-clock milliseconds of the step, which all its images share
    top1: list[float] = field(default_factory=list)  # for each committed cell: the largest probability there
    budget: int = 0  # most drafted nodes that the policy allowed; 0 in the AR baseline
    raster: int | None = None  # index of the raster of that position; None if the model has only one

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as files store them: without `raster` where that is None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(slots=True)
class Decoded:
    """One image, finished or in progress."""

    name: str
    seed: int
    codes: list[int]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # wall clock from prefill to the last code
    target_calls: int = 0  # passes over the image's codes, the prompt's prefill excluded
    drafter_calls: int = 0
    warnings: list[str] = field(default_factory=list)  # those of its request

    @property
    def tau(self) -> float:
        """Cells committed per target call."""
        return tau([self])

    @property
    def mean_depth(self) -> float:
        """Mean tree depth in levels."""
        return _mean([step.depth for step in self.steps])

    @property
    def mean_nodes(self) -> float:
        """Mean drafted nodes per target call."""
        return _mean([step.nodes for step in self.steps])


def tau(images: Iterable[Decoded]) -> float:
    """Returns cells committed per target call, the mean of accepted + 1 over all steps of the images."""
    return _mean([step.accepted + 1 for image in images for step in image.steps])


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
