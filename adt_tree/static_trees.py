"""The static trees of EAGLE-1 as published, and a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.policy import Fixed, TreeShape

Paths = Sequence[Sequence[int]]  # a static tree: one path of child ranks from the root per node


def _paths(listing: str) -> Paths:
    """Reads paths: "0 01" are the first child of the root and that child's second child."""
    return tuple(tuple(int(digit) for digit in word) for word in listing.split())


# The published lists, one line per depth.
MC_SIM_7B_63 = _paths("""
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002
    00000 00001
""")
NAIVE_EXTEND_57 = _paths("""
    0 1 2 3 4
    00 01 02 03 10 11 12 20 21 22 30 31 40
    000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200
    0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200
    00000 00001 00002 00010 00011 00100 00101 00110 00200
""")


def chain(length: int) -> Paths:
    """Returns the tree in which every node has one child."""
    return tuple([0] * depth for depth in range(1, length + 1))


STATIC_TREES = {"mc_sim_7b_63": MC_SIM_7B_63, "naive_extend_57": NAIVE_EXTEND_57, "chain": chain(5)}


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Fixed trees of one topology, a key of STATIC_TREES. UserError for another name."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in STATIC_TREES:
            raise UserError(f"static tree {self.name!r}: choose one of {', '.join(STATIC_TREES)}")

    def __str__(self) -> str:
        """Returns the name of these trees in the fingerprint of a run."""
        return self.name

    @property
    def paths(self) -> Paths:
        return STATIC_TREES[self.name]

    @property
    def largest(self) -> TreeShape:
        width = 1 + max(path[-1] for path in self.paths)
        return TreeShape(max(map(len, self.paths)), width, len(self.paths))

    def policy(self, grid: Grid, slots: int, on_gpu: bool) -> Fixed:
        return Fixed(self.largest)
