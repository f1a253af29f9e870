"""The ring of noise gives, at every position that a step reads, the noise that is computed directly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from adt_tree.grid import Grid, Raster
from adt_tree.noise import Noise
from adt_tree.noise_table import BLOCK, NoiseTable
from adt_tree.roles import run_directly

CODES = 6
GRIDS = {
    "one row": Grid(1, 3 * BLOCK + 5),
    "row ends": Grid(9, 11, row_ends=True),
    "two rasters": Grid(8, 9, before=(Raster(4, 5),)),
    "smaller than a block": Grid(3, 4),
}


def table_of(noise: Noise, grid: Grid, slots: int, ahead: int) -> NoiseTable:
    """Returns a table on the CPU."""
    batch = SimpleNamespace(grid=grid, slots=slots, device=torch.device("cpu"), run=run_directly)
    return NoiseTable(noise, batch, ahead)


@pytest.mark.parametrize("ahead", [1, 2, BLOCK, BLOCK + 3, 200])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_step_reads_the_noise_of_its_positions(grid: Grid, ahead: int) -> None:
    """Images begin at different steps and commit different numbers of cells a step; three slots decode two
    images each. The noise is equal to the bit."""
    noise, random = Noise(CODES, silent=False), torch.Generator().manual_seed(ahead)
    table, cells, seeds, begun, checked = table_of(noise, grid, 3, ahead), [0] * 3, [0] * 3, 0, 0
    while begun < 6 or any(cells):
        for slot in range(3):
            if not cells[slot] and begun < 6 and torch.rand((), generator=random) < 0.3:
                seeds[slot], cells[slot], begun = 7919 * begun - (1 << 40), 1, begun + 1
                table.begin(slot, seeds[slot])
        table.advance([max(count - 1, 0) for count in cells])
        at = torch.tensor(cells)[:, None] + torch.arange(ahead)
        given = table.at(at).gumbel
        for slot in filter(cells.__getitem__, range(3)):
            numbers = [grid.number(position) for position in at[slot].tolist() if position < grid.length]
            direct = noise.gumbel(torch.tensor(seeds[slot : slot + 1]), torch.tensor([numbers]))
            assert torch.equal(given[slot, : len(numbers)], direct[0])
            checked += len(numbers)
            cells[slot] += int(torch.randint(1, ahead + 1, (), generator=random))
            cells[slot] *= cells[slot] < grid.length
    assert checked > 40


def test_a_table_is_small() -> None:
    """At Emu3's size an image holds 40 MB at most, and its first step waits for 3 blocks at most."""
    grid, blocks = Grid(90, 90, row_ends=True), []
    table = table_of(Noise(32768, silent=False), grid, 1, ahead=64)
    assert table.table.nbytes <= 40e6
    table._run = lambda function, place: blocks.append(place)
    table.begin(0, seed=1)
    table.advance([0])
    assert len(blocks) <= 3
