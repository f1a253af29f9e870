"""The shapes of the rivals' windows."""

from __future__ import annotations

from adt_tree.policy import TreeShape


def num_sibling_nodes(width: int, positions: int) -> int:
    """Returns the number of nodes outside the main chain if the first `positions` levels have `width`
    candidates each.

    Level n of such a tree has width ** n nodes, and the main chain takes one of them.
    """
    return sum(width**n - 1 for n in range(1, positions + 1))


def windowed(budget: int, width: int) -> TreeShape:
    """Returns the shape of a rival's window with `budget` drafted nodes.

    As many of the first two positions as the budget allows have `width` candidates each. A chain takes the
    rest of the budget.
    """
    positions = next((n for n in (2, 1) if budget - num_sibling_nodes(width, n) >= n), 0)
    return TreeShape(budget - num_sibling_nodes(width, positions), width, budget)
