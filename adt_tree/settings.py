"""The settings of methods that do not keep the distribution of the model. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from adt_tree.errors import UserError, integer, real, store

LAGS = ("keep", "start")  # how long a row stays `start` cells behind the row above it
INPUTS = ("end", "newest")  # codes that stand in for the cell before a row
FIRST = ("overlap", "plain")  # whether the first row overlaps with the second


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxed acceptance (LANTERN, 2410.03355): a code borrows the probability of its neighbours."""

    delta: float = 0.1  # up to 1: bound on the borrowed mass; above 1: LANTERN++'s factor (2502.06352)
    k: int | None = None  # number of neighbours; None: max_k, or an eighth of the codebook if that is less
    max_k: int = 1000
    table: str | None = None  # file or folder of the nearest codes; None: beside the model, or computed

    def __post_init__(self) -> None:
        values = {
            "delta": real("lantern_delta", self.delta, most=1e6),
            "k": None if self.k is None else integer("lantern_k", self.k),
            "max_k": integer("max_k of lantern", self.max_k),
            "table": None if self.table is None else os.fspath(self.table),
        }
        store(self, values)

    def neighbours(self, num_codes: int) -> int:
        """Returns k for a codebook of that size. UserError if the codebook has too few codes for k."""
        if self.k is None:
            return min(self.max_k, num_codes // 8)
        if self.k > num_codes - 2:
            raise UserError(
                f"lantern_k {self.k}: the codebook has {num_codes} codes; give at most {num_codes - 2}"
            )
        return self.k


# LANTERN's settings in bench and on the demo page: under the published ones images often stay the same.
RELAXED = Lantern(delta=0.5, max_k=100)


@dataclass(frozen=True, slots=True)
class Groups:
    """The rule of gsd (GSD, 2508.07747): a draft counts the probability of a group of codes."""

    gsd_group: int = 14  # G, codes of neighbouring rank, as released; the paper has 10 to 50; 1: exact
    gsd_gap: float = 0.15  # a member's probability differs from the draft's by less than this
    gsd_distance: float | None = None  # of input embeddings, squared; None: the median of the model's codes

    def __post_init__(self) -> None:
        integer("gsd_group", self.gsd_group, 1)
        real("gsd_gap", self.gsd_gap, most=1)
        if self.gsd_distance is not None:
            real("gsd_distance", self.gsd_distance, most=1e9)


@dataclass(frozen=True, slots=True)
class Runs:
    """The rule of sjd-sv (SJD-SV, 2609.13245): a run of drafts is judged by one ratio."""

    sv_mass: float = 0.8  # alpha, share of a run's summed probability that its judged tail has at least
    sv_run: int | None = None  # most drafts of a run; 1: the exact rule; None: no bound

    def __post_init__(self) -> None:
        real("sv_mass", self.sv_mass, most=1)
        if self.sv_run is not None:
            integer("sv_run", self.sv_run, 1)


@dataclass(frozen=True, slots=True)
class Annealing:
    """The rule of cool-sd and cool-sjd (Cool-SD, 2601.09212): p / q is weighted, the more the earlier a draft
    stands. delta 1 with nu 0: the exact rule."""

    cool_delta: float = 1.1  # mean of the weights; the paper has 1.1 and 2
    cool_nu: float = 0.7  # weights fall by exp(-nu) from one level to the next

    def __post_init__(self) -> None:
        real("cool_delta", self.cool_delta, most=1e6)
        real("cool_nu", self.cool_nu, most=100)


@dataclass(frozen=True, slots=True)
class Rows:
    """Several rows of a raster at once (ZipAR, 2412.04062; PJD, 2606.05703): a row begins when the row above
    it has `row_start` cells. Most cells are then chosen before all cells in front of them are known. With a
    whole row for `row_start` it is raster order."""

    row_start: int | None = None  # cells, the row end included; None: a third of a row, as ZipAR published
    # keep: a row stays `row_start` cells behind the row above until that is finished. start: it may catch up
    # once it has begun, as in PJD.
    row_lag: str = "keep"
    # The model reads the cell before a row, the last one of the row above, which is not known yet. In its
    # place it reads the newest code of the row above (newest: as published), or the last code of the newest
    # finished row, and before there is one the first code of the row above (end).
    row_input: str = "end"
    row_first: str = "overlap"  # plain: the second row waits for the whole first row, as in ZipAR

    def __post_init__(self) -> None:
        if self.row_start is not None:
            store(self, {"row_start": integer("row_start", self.row_start, 1)})
        for name, choices in (("row_lag", LAGS), ("row_input", INPUTS), ("row_first", FIRST)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(choices)}")


RelaxedRule = Groups | Runs | Annealing | Rows
