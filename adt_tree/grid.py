"""The codes of an image as rasters. Most models generate one, some a small preview before it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from adt_tree.errors import UserError


class Cell(NamedTuple):
    """A place in a grid."""

    row: int
    column: int
    raster: int  # index of the raster that the row and the column belong to


@dataclass(frozen=True, slots=True)
class Raster:
    """A height x width array of codes, generated row by row."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise UserError(f"grid {self.height} x {self.width}: both sides must be positive")

    @property
    def size(self) -> int:
        """Number of codes of the raster."""
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class Grid:
    """The codes of an image: its raster of height x width, and the rasters that a model generates before it.

    Positions run from 0 to size - 1 through all rasters in the order of generation, row by row. Example:
    Grid(4, 6, before=(Raster(2, 3),)) has a preview of 2 x 3 at positions 0 to 5 and the image at 6 to 29.
    """

    height: int
    width: int
    before: tuple[Raster, ...] = ()

    def __post_init__(self) -> None:
        Raster(self.height, self.width)  # UserError if it has no cells

    @property
    def image(self) -> Raster:
        """The last raster, whose codes become the image."""
        return Raster(self.height, self.width)

    @property
    def rasters(self) -> tuple[Raster, ...]:
        """All rasters in the order of generation."""
        return *self.before, self.image

    @property
    def size(self) -> int:
        """Number of codes of all rasters."""
        return self.height * self.width + sum(raster.size for raster in self.before)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first position of every raster."""
        return tuple(sum(raster.size for raster in self.before[:n]) for n in range(len(self.before) + 1))

    @property
    def sides(self) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        """The sides as files store them: (rows, columns), or one such pair for each of several rasters."""
        pairs = tuple((raster.height, raster.width) for raster in self.rasters)
        return pairs if self.before else pairs[0]

    def cell(self, position: int) -> Cell:
        """Returns the cell of a position. ValueError outside the grid."""
        offset = position
        for index, raster in enumerate(self.before):
            if 0 <= offset < raster.size:
                return Cell(*divmod(offset, raster.width), index)
            offset -= raster.size
        if position < 0 or offset >= self.height * self.width:
            raise ValueError(f"position {position} is outside a grid of {self.size} cells")
        return Cell(*divmod(offset, self.width), len(self.before))
