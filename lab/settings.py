"""The settings of relaxed rivals, of several rows at once, and of the controls that bench measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

from adt_tree.errors import UserError, integer, real, store
from adt_tree.method import MethodSpec, Relaxed

CONTROLS = ("accept-none", "accept-all")
COUNT, SHARE = partial(integer, least=1), partial(real, most=1)


@dataclass(frozen=True, slots=True)
class Numbers(Relaxed):
    """Settings whose numbers are checked and stored as plain ones. None may stand where it is the default."""

    checks: ClassVar[Mapping[str, Callable[[str, Any], object]]]  # by name

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in self.checks and (value is not None or item.default is not None):
                store(self, {item.name: self.checks[item.name](item.name, value)})


@dataclass(frozen=True, slots=True)
class Groups(Numbers):
    """The rule of gsd (GSD, 2508.07747): a draft counts the probability of a group of codes."""

    gsd_group: int = 14  # G, codes of neighbouring rank, as released; the paper has 10 to 50; 1: exact
    gsd_gap: float = 0.15  # a member's probability differs from the draft's by less than this
    gsd_distance: float | None = None  # of input embeddings, squared; None: the median of the model's codes

    checks: ClassVar = {"gsd_group": COUNT, "gsd_gap": SHARE, "gsd_distance": partial(real, most=1e9)}


@dataclass(frozen=True, slots=True)
class Runs(Numbers):
    """The rule of sjd-sv (SJD-SV, 2609.13245): a run of drafts is judged by one ratio."""

    sv_mass: float = 0.8  # alpha, share of a run's summed probability that its judged tail has at least
    sv_run: int | None = None  # most drafts of a run; 1: the exact rule; None: no bound

    checks: ClassVar = {"sv_mass": SHARE, "sv_run": COUNT}


@dataclass(frozen=True, slots=True)
class Annealing(Numbers):
    """The rule of cool-sd and cool-sjd (Cool-SD, 2601.09212): p / q is weighted, the more the earlier a draft
    stands. delta 1 with nu 0: the exact rule."""

    cool_delta: float = 1.1  # mean of the weights; the paper has 1.1 and 2
    cool_nu: float = 0.7  # weights fall by exp(-nu) from one level to the next

    checks: ClassVar = {"cool_delta": partial(real, most=1e6), "cool_nu": partial(real, most=100)}


@dataclass(frozen=True, slots=True)
class Rows(Numbers):
    """Several rows of a raster at once (ZipAR, 2412.04062; PJD, 2606.05703): a row begins when the row above
    it has `row_start` cells. Most cells are then chosen before all cells in front of them are known. With a
    whole row for `row_start` it is raster order.

    The other fields tell the published methods from ours, which has their defaults.
    """

    row_start: int | None = None  # cells, the row end included; None: a third of a row, as ZipAR published
    # The model reads the cell before a row, the last one of the row above, which is not known yet. In its
    # place it reads the newest code of the row above (true), or the last code of the newest finished row, and
    # before there is one the first code of the row above (false). Where rows begin after a row end, the model
    # reads that.
    newest: bool = False
    plain_first: bool = False  # true: the second row waits for the whole first row
    # false: a row stays `row_start` cells behind the row above until that is finished. true: it may catch up
    # once it has begun.
    catches_up: bool = False

    checks: ClassVar = {"row_start": COUNT}
    module: ClassVar[str | None] = "lab.rows.engine"
    raster_order: ClassVar[bool] = False

    @property
    def settings(self) -> tuple[str, ...]:
        return ("row_start",)

    @property
    def suffix(self) -> str:
        return "-rows"


@dataclass(frozen=True, slots=True)
class Control(Relaxed):
    """A rule that ignores the target, which bench measures: what a step costs, and what perfect drafts would
    bring. Its codes are not an image of the model."""

    accept: str  # one of CONTROLS: no draft, or the first child of every node

    module: ClassVar[str | None] = "lab.controls"

    def __post_init__(self) -> None:
        if self.accept not in CONTROLS:
            raise UserError(f"control {self.accept!r}: choose one of {', '.join(CONTROLS)}")

    @property
    def settings(self) -> tuple[str, ...]:
        return ()

    @property
    def suffix(self) -> str:
        return f":{self.accept}"

    def fits(self, spec: MethodSpec) -> bool:
        return bool(spec.verify)  # otherwise the proposer is the rule
