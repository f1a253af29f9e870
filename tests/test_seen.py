"""What is kept of the laws seen, against a store that forgets nothing but the oldest."""

from __future__ import annotations

import pytest
import torch

from adt_tree.seen import LAWS, SeenLaws

POSITIONS, CODES, CPU = 3, 4, torch.device("cpu")


class Plain:
    """One image's laws by position, the newest first, as (above, codes, confidence)."""

    def __init__(self) -> None:
        self.laws: list[list[tuple[int, list[int], list[float]]]] = [[] for _ in range(POSITIONS + 1)]

    def write(self, laws: list[tuple[int, int, int, list[int], list[float]]]) -> None:
        """(order, position, above, codes, confidence) of a pass."""
        for position, held in enumerate(self.laws[:-1]):
            mine = sorted(law for law in laws if law[1] == position)
            held[:0] = [(above, codes, said) for _, _, above, codes, said in mine]
            del held[LAWS:]

    def read(self, position: int, above: int | None) -> tuple[list[int], list[float], bool] | None:
        """The law, and whether it was read below the code."""
        held = self.laws[position]
        for code, codes, said in held:
            if code == above:
                return codes, said, True
        return (*held[0][1:], False) if held else None


def passes(slots: int, nodes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Laws of one pass as SeenLaws.write takes them, some at the position that is not kept."""
    rng = torch.Generator().manual_seed(seed)
    at = torch.randint(0, POSITIONS + 1, (slots, nodes), generator=rng)
    above = torch.randint(0, CODES, (slots, nodes), generator=rng)
    codes = torch.randint(0, 99, (slots, nodes, 2), generator=rng)
    order = torch.stack([torch.randperm(nodes, generator=rng) for _ in range(slots)])
    return at, above, codes, torch.rand((slots, nodes, 2), generator=rng), order


@pytest.mark.parametrize("nodes", [2, 9, 5 * LAWS])
def test_the_newest_law_below_a_code_else_the_newest(nodes: int) -> None:
    """Passes of a few nodes, and of more for one position than are kept."""
    slots = 2
    seen, plain = SeenLaws(POSITIONS, slots, 2, CPU), [Plain() for _ in range(slots)]
    at = torch.arange(POSITIONS + 1).expand(slots, -1)
    for turn in range(30):
        laws = passes(slots, nodes, turn)
        seen.write(*laws)
        for slot, own in enumerate(plain):
            where, above, codes, said, order = (part[slot].tolist() for part in laws)
            own.write(list(zip(order, where, above, codes, said, strict=True)))
        if turn == 20:
            seen.clear(1)
            plain[1] = Plain()
        around = seen.around(at)
        newest = seen.read(around.newest(), 2)[0]
        for code in range(CODES):
            place, below = around.below(torch.full_like(at, code))
            found, confidence = seen.read(place, 2)
            for slot, own in enumerate(plain):
                for position in range(POSITIONS + 1):
                    wanted = own.read(position, code)
                    assert bool(around.known[slot, position]) == (wanted is not None)
                    if wanted is not None:
                        assert found[slot, position].tolist() == wanted[0]
                        assert torch.equal(confidence[slot, position], torch.tensor(wanted[1]))
                        assert bool(below[slot, position]) == wanted[2]
                        assert newest[slot, position].tolist() == own.laws[position][0][1]


def test_fewer_candidates_can_be_read() -> None:
    seen = SeenLaws(1, 1, 3, CPU)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen.write(zero, zero, torch.tensor([[[5, 6, 7]]]), torch.tensor([[[-1.0, -2.0, -3.0]]]), zero)
    codes, said = seen.read(seen.around(zero).newest(), 2)
    assert codes.tolist() == [[[5, 6]]] and said.tolist() == [[[-1.0, -2.0]]]
