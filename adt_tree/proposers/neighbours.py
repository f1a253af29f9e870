"""Drafts for positions that no pass has scored: copies of committed codes of neighbouring cells.

Dimensions: B images, P positions of an image, L positions ahead, A codes of a step, V codes.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.noise import DRAFT, row_ends, uniform
from adt_tree.roles import Batch

ALL = slice(None)


class Neighbours:
    """Copies codes of neighbouring cells to positions that no pass has scored yet.

    `cells` (the option --seed_cells) names the neighbour: "above", the nearest known cell above within the
    raster of the position; "left", the last code before the position that is known; "both", "above" with
    "left" as the second choice; or "random", no neighbour but a random code per position, the same for all
    images. A row end gets its only code, 0, and is no neighbour of other cells.
    """

    def __init__(self, batch: Batch, cells: str) -> None:
        grid, device = batch.grid, batch.device
        self.cells, self._outside = cells, grid.length
        # The first position of each position's raster, and the positions from row to row, [P + 1]; the last
        # entry is for positions outside the image.
        places = [grid.cell(position) for position in range(grid.length)]
        strides = [grid.rasters[place.raster].stride for place in places]
        starts = [n - places[n].row * strides[n] - places[n].column for n in range(grid.length)]
        self._start = torch.tensor([*starts, starts[0]], device=device)
        self._stride = torch.tensor([*strides, strides[0]], device=device)
        self._row_ends = row_ends(grid, device)
        if cells == "random":
            seed, positions = torch.zeros(1, dtype=torch.int64), torch.arange(grid.length + 1)[None]
            codes = (batch.num_codes * uniform(seed, positions, 1, DRAFT)).long()
            self._random = codes.flatten().to(device)
        # The committed codes. The extra column receives codes that fall outside an image.
        self.codes = torch.zeros(batch.slots, grid.length + 1, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, setup: MethodOnModel) -> Self:
        """Returns the neighbours that a method copies."""
        return cls(setup.batch, setup.method.copied_cells)

    def begin(self, slot: int, code: Tensor) -> None:
        """Starts an image with its first code []. Codes of the slot's last image stay, but no cell copies
        them: neighbours of a position lie before it."""
        self.codes[slot, 0] = code

    def ahead(self, first: Tensor, offsets: Tensor) -> Tensor:
        """Returns the positions first + offsets [B, L], from first [B] and offsets, [L] or [B, L]; P for
        positions outside the image."""
        return (first[:, None] + offsets).clamp(max=self._outside)

    def commit(self, first: Tensor, codes: Tensor, count: Tensor) -> None:
        """Stores the codes [B, A] that a step committed from first [B] on; count [B] of them are valid."""
        column = torch.arange(codes.shape[1], device=codes.device)
        at = self.ahead(first, column).masked_fill(column >= count[:, None], self._outside)
        self.codes.scatter_(1, at, codes)

    def last(self, at: Tensor) -> Tensor:
        """Returns the committed code [B, 1] before the first of the positions `at` [B, L]."""
        return self.codes.gather(1, (at[:, :1] - 1).clamp(min=0))

    def fill(self, at: Tensor, codes: Tensor, fresh: Tensor, slots: slice = ALL) -> tuple[Tensor, Tensor]:
        """Drafts codes for the positions that no pass has scored, by copying a neighbouring cell.

        at [B, L]: successive positions in these slots, with their codes [B, L]. fresh [B, L]: true where no
        pass has scored the position; such positions must come last. Returns `codes` with the first
        neighbour's code at fresh positions, and the second neighbour's codes [B, L] at all positions: the one
        on the left if the first is above, and the other way round.
        """
        last = at[:, :1] - 1 + (~fresh).sum(dim=1, keepdim=True)  # the last position whose code is known
        if self.cells == "random":
            first, second = self._random[at], codes
        else:
            if self._row_ends is not None:
                last = last - self._row_ends[last].long()
            above, left = self._above(at, last), last.expand_as(at)
            places = (left, above) if self.cells == "left" else (above, left)
            known = self.codes[slots].scatter(1, at, codes)
            first, second = (known.gather(1, place) for place in places)
        if self._row_ends is not None:
            first, second = (code.masked_fill(self._row_ends[at], 0) for code in (first, second))
        return torch.where(fresh, first, codes), second

    def _above(self, at: Tensor, last: Tensor) -> Tensor:
        """Returns the positions [B, L] of the nearest cells above `at` [B, L] that are not after `last`
        [B, 1]; `last` where the raster has none.

        Example: of a raster 5 cells wide that begins at position 6, last = 13 and at = 19 give 9: the cell
        above 19 is at 14, which is not known yet, and the cell above that at 9.
        """
        stride = self._stride[at]
        rows = ((at - last - 1) // stride).clamp(min=0) + 1
        above = at - rows * stride
        return torch.where(above >= self._start[at], above, last)
