"""The token ids of an image's cells: one for every code, and one for row ends in models that have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.noise import row_ends


@dataclass(frozen=True, slots=True)
class CellIds:
    """The token ids of one model's cells."""

    codes: range  # token ids of the codebook
    row_end: int | None = None  # token id after every row of codes but the last; None: the model has none


class CellTokens:
    """Turns the codes of cells into token ids.

    Whether a cell is a row end follows from its index in the sequence, which the device knows, so the host
    need not. The code at a row end is not read. For grids without row ends there is no tensor here, and a
    token id is the code plus that of code 0.
    """

    def __init__(self, grid: Grid, ids: CellIds, slots: int, device: torch.device) -> None:
        """Raises AssertionError if the grid has row ends and the model has none."""
        assert not (grid.row_ends and ids.row_end is None), "a grid with row ends needs their token id"
        self._first_code, self._row_end = ids.codes.start, ids.row_end
        self._row_ends = row_ends(grid, device)
        if self._row_ends is not None:
            self._first = torch.zeros(slots, dtype=torch.int64, device=device)  # [B] index of each cell 0

    def begin(self, slot: int, first: int) -> None:
        """Starts an image whose cell 0 has the index `first` in its sequence."""
        if self._row_ends is not None:
            self._first[slot] = first

    def ids(self, codes: Tensor, length: Tensor, depths: Tensor) -> Tensor:
        """Returns the token ids of codes [B, N] that stand depths, [B, N], [1, N] or [N], after the first
        `length` tokens of their sequences. What lies before or after the image is no row end. length: [R],
        slots first."""
        ids = codes + self._first_code
        if self._row_ends is None or self._row_end is None:
            return ids
        position = (length[: len(codes)] - self._first)[:, None] + depths
        return ids.masked_fill(self._row_ends[position.clamp(0, len(self._row_ends) - 1)], self._row_end)
