"""SJD-PAC (2603.18599): the coupled tail, and several candidates for each of the foremost positions.

Where drafts are rejected most, at the first open positions, the window is a K-ary tree: K candidates, the
code X of the position and draws from its q without replacement, below every candidate of the position in
front. Recursive rejection tries them in turn. Behind the first candidates the window goes on as a chain. As
published K is 4 and two positions branch (the root counts as a level: depth 3), in 64 nodes.
"""

from __future__ import annotations

from itertools import product

from adt_tree.policy import TreeShape
from adt_tree.tree import Paths, chain


def product_tree(shape: TreeShape) -> Paths:
    """A main chain of shape.depth codes, of which the first have shape.width candidates: as many positions as
    the budget allows. Width 1: the chain alone."""
    length, positions = min(shape.depth, shape.budget), 0
    spare = shape.budget - length
    while shape.width > 1 and positions < length:
        more = shape.width ** (positions + 1) - 1
        if more > spare:
            break
        spare, positions = spare - more, positions + 1
    branches = [path for n in range(1, positions + 1) for path in product(range(shape.width), repeat=n)]
    return (*branches, *chain(length)[positions:])
