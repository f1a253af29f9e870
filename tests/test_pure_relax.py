"""Neighbour tables and mass budgets, by hand."""

from __future__ import annotations

import pytest
import torch

from adt_tree.relax import Relaxation, nearest_table

P = [0.1, 0.2, 0.3, 0.4]
TABLE = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]])


@pytest.mark.parametrize(
    ("p", "code", "k", "delta", "admissible", "mass"),
    [
        (P, 0, 2, 0.1, [False, False], 0.0),  # S_1 = 0.2 is over
        (P, 0, 2, 0.25, [True, False], 0.2),
        (P, 0, 2, 0.55, [True, True], 0.5),  # S_2 = 0.2 + 0.3
        (P, 0, 2, 1.0, [True, True], 0.5),
        (P, 0, 1, 1.0, [True], 0.2),  # k bounds the set
        (P, 0, 2, 2.0, [False, False], 0.0),  # (2 - 1) p(x) = 0.1
        (P, 0, 2, 3.5, [True, False], 0.2),  # 2.5 p(x) = 0.25
        (P, 0, 2, 7.0, [True, True], 0.5),
        (P, 3, 2, 1.8, [True, False], 0.3),  # 0.8 * 0.4 = 0.32
        (P, 0, 2, 0.0, [False, False], 0.0),
        (P, 0, 0, 0.9, [False], 0.0),  # one column that is never admissible
        (P, 1, 0, 3.0, [False], 0.0),
        ([0.1, 0.5, 0.01, 0.39], 0, 2, 0.3, [False, False], 0.0),  # cheap behind dear: not reached
        ([0.5, 0.0, 0.0, 0.5], 0, 2, 0.0, [False, False], 0.0),  # no budget: not even those without mass
    ],
)
def test_budget_is_a_prefix(
    p: list[float], code: int, k: int, delta: float, admissible: list[bool], mass: float
) -> None:
    near, allowed, borrowed = Relaxation(TABLE, k, delta).aggregate(torch.tensor(p), torch.tensor(code))
    assert near.tolist() == TABLE[code, : max(k, 1)].tolist()
    assert allowed.tolist() == admissible
    assert borrowed.item() == pytest.approx(mass)


def test_nearest_table() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    for width in range(4):
        table = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]])[:, :width]
        assert torch.equal(nearest_table(line, width), table)
    for width in (-1, 4):
        with pytest.raises(ValueError, match="neighbours"):
            nearest_table(line, width)


def test_nearest_table_in_blocks() -> None:
    """More codes than one block holds: self stays excluded, distances ascend."""
    codebook = torch.randn(1100, 4, generator=torch.Generator().manual_seed(0))
    everything = torch.cdist(codebook.double(), codebook.double()).fill_diagonal_(float("inf"))
    distance = everything.gather(1, nearest_table(codebook, 5))
    torch.testing.assert_close(everything.topk(5, largest=False).values, distance)
