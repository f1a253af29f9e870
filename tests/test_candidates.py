"""What is kept of earlier distributions, against a store that forgets nothing but the oldest."""

from __future__ import annotations

import math

import pytest
import torch

from adt_tree.proposers.candidates import BELOW, HISTORY, LATE, NEWEST, History

POSITIONS, CODES, CPU = 3, 4, torch.device("cpu")


class Plain:
    """One image's entries by position, the newest first, as (pass, above, codes, confidence)."""

    def __init__(self) -> None:
        self.entries: list[list[tuple[int, int, list[int], list[float]]]] = [[] for _ in range(POSITIONS + 1)]

    def write(self, turn: int, entries: list[tuple[int, int, int, list[int], list[float]]]) -> None:
        """(order, position, above, codes, confidence) of a pass."""
        for position, held in enumerate(self.entries[:-1]):
            mine = sorted(entry for entry in entries if entry[1] == position)
            held[:0] = [(turn, above, codes, said) for _, _, above, codes, said in mine]
            del held[HISTORY:]

    def best(self, position: int, above: int) -> int:
        """The best code of the newest entry read below a code, else of the newest."""
        held = self.entries[position]
        return next((entry for entry in held if entry[1] == above), held[0])[2][0]

    def mixture(self, position: int, above: int) -> list[float]:
        """Mass by code."""
        mass, total, held = [0.0] * CODES, 0.0, self.entries[position]
        for number, (turn, below, codes, said) in enumerate(held):
            weight = BELOW if below == above else 1.0
            weight *= (LATE if turn == held[0][0] else 1.0) * (NEWEST if number == 0 else 1.0)
            total += weight
            for code, value in zip(codes, said, strict=True):
                mass[code] += weight * math.exp(value)
        return [part / total for part in mass]


def passes(slots: int, nodes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Entries of one pass as History.write takes them, some at the position that is not kept."""
    rng = torch.Generator().manual_seed(seed)
    at = torch.randint(0, POSITIONS + 1, (slots, nodes), generator=rng)
    above = torch.randint(0, CODES, (slots, nodes), generator=rng)
    codes = torch.rand((slots, nodes, CODES), generator=rng).topk(2).indices
    said = torch.rand((slots, nodes, 2), generator=rng) - 2.0
    order = torch.stack([torch.randperm(nodes, generator=rng) for _ in range(slots)])
    return at, above, codes, said, order


@pytest.mark.parametrize("nodes", [2, 9, 5 * HISTORY])
def test_the_entries_around_a_position(nodes: int) -> None:
    """Passes of a few nodes, and of more for one position than are kept."""
    slots = 2
    seen, plain = History(POSITIONS, slots, 2, CPU), [Plain() for _ in range(slots)]
    at = torch.arange(POSITIONS + 1).expand(slots, -1)
    for turn in range(30):
        written = passes(slots, nodes, turn)
        seen.write(*written)
        for slot, own in enumerate(plain):
            where, above, codes, said, order = (part[slot].tolist() for part in written)
            own.write(turn, list(zip(order, where, above, codes, said, strict=True)))
        if turn == 20:
            seen.clear(1)
            plain[1] = Plain()
        around = seen.entries(at)
        newest = around.newest()
        for code in range(CODES):
            above = torch.full_like(at, code)
            below, (mixed, said) = around.below(above), around.mixture(above, CODES, CODES)
            for slot, own in enumerate(plain):
                for position in range(POSITIONS + 1):
                    held, here = own.entries[position], (slot, position)
                    if not held:
                        assert not said[here].isfinite().any()
                        continue
                    assert newest[here] == held[0][2][0] and below[here] == own.best(position, code)
                    mass = torch.tensor(own.mixture(position, code))
                    torch.testing.assert_close(said[here].exp(), mass[mixed[here]])
                    torch.testing.assert_close(said[here].exp(), mass.sort(descending=True).values)


def test_fewer_candidates_can_be_read() -> None:
    seen = History(1, 1, 3, CPU)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen.write(zero, zero, torch.tensor([[[5, 6, 7]]]), torch.tensor([[[-1.0, -2.0, -3.0]]]), zero)
    codes, said = seen.entries(zero).mixture(zero, 2, 9)
    assert codes.tolist() == [[[5, 6]]]
    torch.testing.assert_close(said, torch.tensor([[[-1.0, -2.0]]]))
