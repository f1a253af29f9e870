"""The noise of the images in flight, computed shortly before it is read.

Dimensions: B images in flight (slots), N positions, V codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adt_tree.noise import Noise, PositionNoise, row_ends
from adt_tree.roles import Batch
from adt_tree.tree import to_device

BLOCK = 32  # codes whose noise is computed at a time, which bounds temporary memory


class NoiseTable:
    """The Gumbel noise of the images in flight. Successive trees read the noise of the same positions, so it
    is computed once, shortly before the first of them, and is overwritten when their codes are committed.

    Noise is keyed by the number of a code, not by its position, so that row ends take none. Every slot has a
    ring of R rows, fp32 [B * R, V]: the noise of code n lies in row n % R. There is none where the noise is
    silent.
    """

    def __init__(self, noise: Noise, batch: Batch, ahead: int) -> None:
        """ahead: the number of successive positions that a step reads, at most."""
        grid, device = batch.grid, batch.device
        self.noise, self._grid, self._run, self._ahead = noise, grid, batch.run, ahead
        # advance() computes whole blocks, so that it may be up to BLOCK - 1 codes further than it has to.
        self._ring = ahead + BLOCK - 1
        rows = 0 if noise.silent else batch.slots * self._ring
        self.table = torch.zeros(rows, noise.num_codes, device=device)
        self._starts = torch.arange(batch.slots, device=device)[:, None] * self._ring
        self.seeds = torch.zeros(batch.slots, dtype=torch.int64, device=device)  # [B] of the slots' images
        self._done = [grid.size] * batch.slots  # codes of each slot's image whose noise was computed
        self._row_ends = row_ends(grid, device)
        if self._row_ends is not None:
            self._number = torch.tensor([*map(grid.number, range(grid.length)), grid.size], device=device)

    def begin(self, slot: int, seed: int, silent: bool = False) -> None:
        """Starts an image of that seed in the slot. Its noise is zero if `silent`."""
        self.seeds[slot] = seed
        if self.noise.silent:
            return
        self._done[slot] = self._grid.size if silent else 0
        if silent:
            self.table[slot * self._ring : (slot + 1) * self._ring] = 0

    def advance(self, committed: Sequence[int]) -> None:
        """Computes what is missing of the noise that the next step reads. committed: the number of cells in
        each slot's prefix, all but the newest one."""
        for slot, cells in enumerate(committed):
            end = min(self._grid.number(cells + 1) + self._ahead, self._grid.size)
            while self._done[slot] < end:
                place = to_device((slot, self._done[slot]), self.table.device)
                self._run(self._compute, place)
                self._done[slot] += BLOCK

    def _compute(self, place: Tensor) -> None:
        """Computes the noise of a block. place [2]: the slot, and the number of the first code."""
        slot, first = place.split(1)
        numbers = first + torch.arange(BLOCK, device=place.device)
        rows = slot * self._ring + numbers % self._ring
        self.table.index_copy_(0, rows, self.noise.gumbel(self.seeds[slot], numbers[None])[0])

    def at(self, positions: Tensor) -> PositionNoise:
        """Returns the noise at positions [B, N] of the slots' images: of `ahead` positions from the first one
        that is not committed. Past the end of an image it is that of any code; no code there is ever
        committed."""
        numbers, forced = positions, None
        if self._row_ends is not None:
            positions = positions.clamp(max=len(self._number) - 1)
            numbers, forced = self._number[positions], self._row_ends[positions]
        if self.noise.silent:
            return PositionNoise(self.noise.gumbel(self._starts[:, 0], positions), forced)
        rows = self._starts + numbers % self._ring
        return PositionNoise(self.table.index_select(0, rows.flatten()).view(*positions.shape, -1), forced)
