"""Which rows of an image the next pass continues, and how many cells each may commit.

A row is behind the row above it, so the rows in progress lie between the finished ones and those that have
not begun. Each can commit a cell in every pass, because the row above it does so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from lab.settings import Rows


@dataclass(frozen=True, slots=True)
class Head:
    """A row in a pass. Its root is the node at the cell before the row's next one."""

    position: int  # of the root
    source: int  # position of the cell whose code the root has
    known: bool  # the root is a committed cell; otherwise its code is a stand-in, which no cache keeps
    room: int  # most cells that the row may commit; 0 if the pass only reads the row's last one
    begins: bool = False  # the row has had no pass before


@dataclass(slots=True)
class Progress:
    """What is committed of one image."""

    committed: list[int]  # cells by row
    codes: list[int]  # by position; 0 where none is committed
    finished: int = -1  # the row that the last pass finished; -1 if there is none


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which the cells of a raster are decoded."""

    raster: Raster
    start: int  # cells of a row with which the row below it begins
    lag: int  # cells that a row is behind an unfinished row above it
    newest: bool  # what stands in for the cell before a row: see Rows
    plain_first: bool  # the second row waits for the whole first row

    @classmethod
    def of(cls, rows: Rows, grid: Grid) -> Self:
        """Returns the schedule of an image. UserError for images of several rasters, and for a start of more
        cells than a row has."""
        raster = grid.image
        if grid.before:
            raise UserError("row_start: this model makes one raster after the other; choose another method")
        if rows.row_start is not None and rows.row_start > raster.stride:
            raise UserError(
                f"row_start {rows.row_start}: a row has {raster.stride} cells; give at most these"
            )
        start = rows.row_start or max(1, raster.stride // 3)
        # The last row has no row end. Two cells behind, it is not finished before the row above it.
        lag = max(1 if rows.catches_up else start, 1 + raster.row_ends)
        return cls(raster, start, lag, rows.newest, rows.plain_first)

    @property
    def raster_order(self) -> bool:
        """True if every row begins when the row above is finished."""
        return self.start == self.raster.stride

    @property
    def heads(self) -> int:
        """The largest number of rows in a pass. A row has the head of its number modulo this."""
        # All rows in progress but the lowest have at least `start` cells, and each is `lag` cells behind the
        # one above it. The last cell of a finished row is read in one pass more.
        behind = -(-(self.raster.stride - self.start) // self.lag)
        return min(self.raster.height, behind + 2)

    def length(self, row: int) -> int:
        """Returns the number of cells of a row. Nothing follows the last row, so it has no row end."""
        return self.raster.stride if row < self.raster.height - 1 else self.raster.width

    def begin(self, code: int) -> Progress:
        """Returns the progress of an image of which the prompt gave the first code."""
        return Progress([1, *[0] * (self.raster.height - 1)], [code, *[0] * (self.raster.length - 1)])

    def next_heads(self, progress: Progress) -> list[Head | None]:
        """Returns the heads of the next pass; None for those without a row."""
        committed, stride = progress.committed, self.raster.stride
        heads: list[Head | None] = [None] * self.heads
        for row, count in enumerate(committed):
            position, full = row * stride + count - 1, count == self.length(row)
            if full and (row != progress.finished or not committed[row + 1]):
                continue  # its last cell is in the cache, or else the root of the row below
            room = 0 if full else self._room(committed, row)
            if not full and not room:
                break
            known = count > 0 or self._is_finished(committed, row - 1)
            source = position if known or self.raster.row_ends else self._stand_in(committed, row)
            begins = count == (row == 0)  # the prompt gave the first code of the first row
            heads[row % len(heads)] = Head(position, source, known, room, begins)
        return heads

    def advance(self, progress: Progress, heads: Sequence[Head], codes: Sequence[Sequence[int]]) -> None:
        """Adds the codes that a pass committed: codes[n] to the row of heads[n]."""
        progress.finished = -1
        for head, new in zip(heads, codes, strict=True):
            first = head.position + 1
            row = first // self.raster.stride
            progress.codes[first : first + len(new)] = new
            progress.committed[row] += len(new)
            if self._is_finished(progress.committed, row):
                progress.finished = row

    def image(self, progress: Progress) -> list[int] | None:
        """Returns the codes of a finished image in raster order, without row ends; None before that."""
        if sum(progress.committed) < self.raster.length:
            return None
        width, stride = self.raster.width, self.raster.stride
        return [code for position, code in enumerate(progress.codes) if position % stride < width]

    def _is_finished(self, committed: Sequence[int], row: int) -> bool:
        return committed[row] == self.length(row)

    def _room(self, committed: Sequence[int], row: int) -> int:
        """Returns the number of cells that an unfinished row may commit in the next pass."""
        count = committed[row]
        if row == 0 or self._is_finished(committed, row - 1):
            return self.length(row) - count
        above = committed[row - 1]
        if not count and (above < self.start or (row == 1 and self.plain_first)):
            return 0
        return max(0, above - count - self.lag + 1)

    def _stand_in(self, committed: Sequence[int], row: int) -> int:
        """Returns the position of the code that stands in for the last one of the unfinished row above."""
        stride = self.raster.stride
        if self.newest:
            return (row - 1) * stride + committed[row - 1] - 1
        unfinished = next(r for r in range(row) if not self._is_finished(committed, r))
        return unfinished * stride - 1 if unfinished else (row - 1) * stride
