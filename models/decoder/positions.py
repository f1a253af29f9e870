"""Rotary positions on three axes (time, row, column) for images of several rasters (GLM-Image).

A text token has its index on every axis. The codes of a raster share one position in time, and their rows and
columns count from there: with p the next free position, the code in row r and column c is at (p, p + r,
p + c), and the token after a raster of h x w is at p + max(h, w) on every axis.

Example: a prompt of 3 tokens, and a raster of 1 x 2.

    index in the sequence    0        1        2        3        4        5 (token after the raster)
    position                 0 0 0    1 1 1    2 2 2    3 3 3    3 3 4    5 5 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from adt_tree.grid import Grid


def code_positions(grid: Grid) -> Tensor:
    """Returns the positions of all codes and of one token after them, relative to that of the first code:
    [grid.size + 1, 3] int64. For a raster of 1 x 2: (0, 0, 0), (0, 0, 1), (2, 2, 2)."""
    parts, free = [], 0
    for raster in grid.rasters:
        sides = (torch.arange(side, device="cpu") for side in (1, raster.height, raster.width))
        cells = torch.cartesian_prod(*sides)
        parts.append(free + cells)
        free += max(raster.height, raster.width)
    return torch.cat((*parts, torch.full((1, 3), free, device="cpu")))


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """Turns indices in the sequences of R cache rows into positions on three axes."""

    table: Tensor  # [count, 3] int64: table[text + n] + first is the position of index first + n
    first: Tensor  # [R] int64: index of each row's first code; `text` as long as the row reads its prompt
    text: int  # tokens of the longest prompt

    @classmethod
    def allocate(cls, grid: Grid, text: int, count: int, rows: int, device: torch.device) -> Self:
        """Returns the positions of empty rows of `count` indices each. Indices past the token after the codes
        repeat its position."""
        before = torch.arange(-text, 0, device="cpu")[:, None].expand(-1, 3)
        codes = code_positions(grid)
        index = torch.arange(count - text, device="cpu").clamp(max=len(codes) - 1)
        table = torch.cat((before, codes[index])).to(device)
        return cls(table, torch.full((rows,), text, device=device), text)

    def row(self, at: slice | Tensor) -> Self:
        """Returns the positions of some rows; those of a slice are over the same memory."""
        return type(self)(self.table, self.first[at], self.text)

    def clear(self, rows: slice) -> None:
        """Empties rows: all that follows is text until begin()."""
        self.first[rows] = self.text

    def begin(self, index: Tensor) -> None:
        """Ends the prompts: the next index [R] of each row is that of its first code."""
        self.first.copy_(index)

    def place(self, index: Tensor) -> Tensor:
        """Returns positions [R, N, 3] of indices [R, N]."""
        first = self.first[:, None]
        return first[..., None] + self.table[index - first + self.text]
