"""The raster of an image's codes."""

from __future__ import annotations

from dataclasses import dataclass

from adt_tree.errors import UserError


@dataclass(frozen=True, slots=True)
class Grid:
    """A height x width raster of codes, generated row by row. Positions run from 0 to size - 1."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise UserError(f"grid {self.height} x {self.width}: both sides must be positive")

    @property
    def size(self) -> int:
        """Number of codes of an image."""
        return self.height * self.width

    def cell(self, position: int) -> tuple[int, int]:
        """Returns (row, column) of a position. ValueError outside the raster."""
        if not 0 <= position < self.size:
            raise ValueError(f"position {position} is outside a grid of {self.size} cells")
        return divmod(position, self.width)
