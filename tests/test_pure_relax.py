"""Neighbour tables and mass budgets, by hand."""

from __future__ import annotations

import pytest
import torch

from adt_tree.relax import Relaxation, nearest_table

P = torch.tensor([0.1, 0.2, 0.3, 0.4])
TABLE = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]])


@pytest.mark.parametrize(
    ("code", "k", "delta", "admissible", "mass"),
    [
        (0, 2, 0.1, [False, False], 0.0),  # S_1 = 0.2 is over
        (0, 2, 0.25, [True, False], 0.2),
        (0, 2, 0.55, [True, True], 0.5),  # S_2 = 0.2 + 0.3
        (0, 2, 1.0, [True, True], 0.5),
        (0, 1, 1.0, [True], 0.2),  # k bounds the set
        (0, 2, 2.0, [False, False], 0.0),  # (2 - 1) p(x) = 0.1
        (0, 2, 3.5, [True, False], 0.2),  # 2.5 p(x) = 0.25
        (0, 2, 7.0, [True, True], 0.5),
        (3, 2, 1.8, [True, False], 0.3),  # 0.8 * 0.4 = 0.32
        (0, 2, 0.0, [False, False], 0.0),
        (0, 0, 0.9, [False], 0.0),  # one column that is never admissible
        (1, 0, 3.0, [False], 0.0),
    ],
)
def test_budget_is_a_prefix(code: int, k: int, delta: float, admissible: list[bool], mass: float) -> None:
    near, allowed, borrowed = Relaxation(TABLE, k, delta).aggregate(P, torch.tensor(code))
    assert near.tolist() == TABLE[code, : max(k, 1)].tolist()
    assert allowed.tolist() == admissible
    assert borrowed.item() == pytest.approx(mass)


def test_a_cheap_neighbour_behind_a_dear_one_is_not_reached() -> None:
    p = torch.tensor([0.1, 0.5, 0.01, 0.39])
    _, allowed, mass = Relaxation(TABLE, 2, 0.3).aggregate(p, torch.tensor(0))
    assert allowed.tolist() == [False, False] and mass.item() == 0


def test_no_budget_merges_nothing_even_where_there_is_no_mass() -> None:
    """Filtered codes have mass 0 <= 0; the exact rule must not merge them."""
    p = torch.tensor([0.5, 0.0, 0.0, 0.5])
    _, allowed, _ = Relaxation(TABLE, 2, 0.0).aggregate(p, torch.tensor(0))
    assert allowed.tolist() == [False, False]


def test_batches() -> None:
    p = P.expand(2, 3, 4)
    codes = torch.tensor([[0, 1, 2], [3, 2, 1]])
    near, allowed, mass = Relaxation(TABLE, 2, 0.5).aggregate(p, codes)
    assert near.shape == allowed.shape == (2, 3, 2)
    for row in range(2):
        for place in range(3):
            alone = Relaxation(TABLE, 2, 0.5).aggregate(P, codes[row, place])
            assert mass[row, place] == alone[2]


def test_nearest_table() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert nearest_table(line, 3).tolist() == [[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]]
    assert nearest_table(line, 1).tolist() == [[1], [0], [1], [2]]
    assert nearest_table(line, 0).shape == (4, 0)
    for width in (-1, 4):
        with pytest.raises(ValueError, match="neighbours"):
            nearest_table(line, width)


def test_nearest_table_in_blocks() -> None:
    """More codes than one block holds: self stays excluded, distances ascend."""
    codebook = torch.randn(1100, 4, generator=torch.Generator().manual_seed(0))
    table = nearest_table(codebook, 5)
    assert table.shape == (1100, 5)
    assert not bool((table == torch.arange(1100)[:, None]).any())
    distance = (codebook[table].double() - codebook[:, None].double()).norm(dim=-1)
    assert bool((distance.diff(dim=1) >= 0).all())
    everything = torch.cdist(codebook.double(), codebook.double()).fill_diagonal_(float("inf"))
    torch.testing.assert_close(everything.topk(5, largest=False).values, distance)
