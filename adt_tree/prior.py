"""A cost-based tree shape from the acceptance around a cell: the spatial prior. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from adt_tree.policy import AdaptConstants, Cell, TreeShape

RADIUS = 3  # cells: the neighbourhood's reach to the left, above and to either side
LENGTH = 1.5  # cells: l, how far acceptance is alike
STRENGTH = 4.0  # cells: kappa, the neighbours that the image's own rate is worth
# Offset -> weight exp(-distance^2 / (2 l^2)) of what raster order can have decoded before a cell.
WEIGHTS = {
    (row, column): math.exp(-(row * row + column * column) / (2 * LENGTH * LENGTH))
    for row in range(-RADIUS, 1)
    for column in range(-RADIUS, RADIUS + 1)
    if (row, column) < (0, 0)
}


@dataclass(slots=True)
class _Evidence:
    """One image's tested cells: whether a draft was accepted there, and how many were."""

    accepted: dict[Cell, bool] = field(default_factory=dict)
    hits: int = 0


class SpatialPrior:
    """Depth where one more level stops paying, at the acceptance rate estimated around the root's cell.

    With s_j = 1 where cell j took a draft, 0 where none of the drafts was the choice:

        alpha0 = (1 + sum s_j) / (2 + n)                          over the image's n tested cells
        a      = (kappa alpha0 + sum w_j s_j) / (kappa + sum w_j)    over tested cells within RADIUS
        depth  = argmax_d (1 + a + ... + a^d) / (1 + c d)         codes a cycle over its cost in target passes

    w_j falls off as a Gaussian of the distance, c is constants.level_cost; depth is sought within its bounds,
    the least at a tie. The width shares the budget among the levels: budget / depth, halves rounded up,
    within its bounds. An untested cell is no evidence (right-censoring): the code after a tree whose levels
    were all accepted. The policy is not told where the budget or the beam ended a path above the depth asked
    for; the code there counts as rejected. The root itself is left out: the last tree ended there, whatever
    the rate.

    Shapes depend on earlier cycles alone, so every rule stays lossless. The objective is Leviathan et al.'s
    (2211.17192, theorem 3.8); a neighbourhood's rate in place of ADT-Tree's copy of one cell is ours.
    """

    def __init__(self, constants: AdaptConstants, slots: int) -> None:
        self.constants = constants
        self._evidence = [_Evidence() for _ in range(slots)]

    def reset(self, slot: int, seed: int) -> None:
        """Forget the slot's image; nothing is drawn at random."""
        self._evidence[slot] = _Evidence()

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        """The best depth at the rate around the cell, and the width the budget leaves."""
        constants = self.constants
        depth = best_depth(
            self.rate(slot, cell), constants.level_cost, constants.depth_min, constants.depth_max
        )
        share = (2 * constants.budget + depth) // (2 * depth)
        width = min(max(share, constants.width_min), constants.width_max)
        return TreeShape(depth, width, constants.budget)

    def observe(self, slot: int, accepted: int, drafted_depth: int, committed: list[Cell]) -> None:
        """Accepted cells are ones; the code after them is a zero if a level was drafted for it."""
        evidence = self._evidence[slot]
        evidence.accepted.update(dict.fromkeys(committed[:accepted], True))
        evidence.hits += accepted
        if accepted < drafted_depth:
            evidence.accepted[committed[accepted]] = False

    def rate(self, slot: int, cell: Cell) -> float:
        """The estimated probability that a level of the tree rooted at cell holds the target's choice, in
        (0, 1)."""
        evidence, (row, column) = self._evidence[slot], cell
        image = (1 + evidence.hits) / (2 + len(evidence.accepted))
        weighted, total = STRENGTH * image, STRENGTH
        for (down, right), weight in WEIGHTS.items():
            taken = evidence.accepted.get((row + down, column + right))
            if taken is not None:
                weighted += weight * taken
                total += weight
        return weighted / total


def best_depth(rate: float, cost: float, least: int, most: int) -> int:
    """The least depth d in [least, most] at which (1 + rate + ... + rate^d) / (1 + cost d) is greatest.

    rate: acceptance of one level, in [0, 1]. cost: of one level, in target passes, not negative.
    """
    best, best_value, codes = least, 0.0, 1.0
    for depth in range(1, most + 1):
        codes += rate**depth
        value = codes / (1 + cost * depth)
        if depth >= least and value > best_value:
            best, best_value = depth, value
    return best
