"""Raster positions and cells."""

from __future__ import annotations

import pytest

from adt_tree.grid import Grid


def test_cells_row_by_row() -> None:
    grid = Grid(2, 3)
    assert grid.size == 6
    assert [grid.cell(position) for position in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("position", [-1, 6, 100])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match=str(position)):
        Grid(2, 3).cell(position)


@pytest.mark.parametrize("sides", [(0, 3), (3, 0), (-1, 2)])
def test_empty_grids_are_refused(sides: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Grid(*sides)
