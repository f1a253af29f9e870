"""The cells of an image as rasters. Most models generate one, some a small preview before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from adt_tree.errors import UserError


class Cell(NamedTuple):
    """A place in a grid."""

    row: int
    column: int  # the width of the raster for a row end
    raster: int  # index of the raster that the row and the column belong to


@dataclass(frozen=True, slots=True)
class Raster:
    """A height x width array of codes, generated row by row.

    Some models end every row but the last with a token about which they have no choice. With row_ends it is a
    cell after the row: a position like any other, which holds no code of the image.
    """

    height: int
    width: int
    row_ends: bool = False

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise UserError(f"grid {self.height} x {self.width}: both sides must be positive")

    @property
    def size(self) -> int:
        """Number of codes of the raster."""
        return self.height * self.width

    @property
    def stride(self) -> int:
        """Number of positions from one row to the next."""
        return self.width + self.row_ends

    @property
    def length(self) -> int:
        """Number of positions of the raster, row ends included."""
        return self.height * self.stride - self.row_ends


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of an image: its raster of height x width, and the rasters that a model generates before it.

    Positions run from 0 to length - 1 through all rasters in the order of generation, row by row. Codes are
    numbered from 0 to size - 1 in the same order, without the row ends. Examples: Grid(4, 6,
    before=(Raster(2, 3),)) has a preview of 2 x 3 at positions 0 to 5 and the image at 6 to 29. Grid(2, 3,
    row_ends=True) has the codes 0 1 2 at positions 0 1 2, a row end at 3, and the codes 3 4 5 at 4 5 6.
    """

    height: int
    width: int
    before: tuple[Raster, ...] = ()
    row_ends: bool = False  # of the image's raster

    def __post_init__(self) -> None:
        Raster(self.height, self.width)  # UserError if it has no cells

    @property
    def image(self) -> Raster:
        """The last raster, whose codes become the image."""
        return Raster(self.height, self.width, self.row_ends)

    @property
    def rasters(self) -> tuple[Raster, ...]:
        """All rasters in the order of generation."""
        return *self.before, self.image

    @property
    def size(self) -> int:
        """Number of codes of all rasters."""
        return sum(raster.size for raster in self.rasters)

    @property
    def length(self) -> int:
        """Number of positions of all rasters: the codes and the row ends."""
        return sum(raster.length for raster in self.rasters)

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of the first code of every raster."""
        return tuple(sum(raster.size for raster in self.before[:n]) for n in range(len(self.before) + 1))

    def cell(self, position: int) -> Cell:
        """Returns the cell of a position. ValueError outside the grid."""
        offset = position
        for index, raster in enumerate(self.rasters):
            if 0 <= offset < raster.length:
                return Cell(*divmod(offset, raster.stride), index)
            offset -= raster.length
        raise ValueError(f"position {position} is outside a grid of {self.length} cells")

    def is_row_end(self, position: int) -> bool:
        """Returns whether the cell of a position is a row end."""
        cell = self.cell(position)
        return cell.column == self.rasters[cell.raster].width

    def number(self, position: int) -> int:
        """Returns the number of codes before a position: that of the code there, if it is no row end."""
        row, column, index = self.cell(position)
        return self.starts[index] + row * self.rasters[index].width + column
