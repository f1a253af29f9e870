"""SJD-PAC (2603.18599): coupled SJD with several candidates for the first positions of the window."""

from __future__ import annotations

from itertools import product

from adt_tree.method_on_model import MethodOnModel
from adt_tree.policy import TreeShape
from adt_tree.static_trees import Paths, chain
from adt_tree.verify import Rule
from lab.rivals.jacobi_window import JacobiWindow, window_and_rule
from lab.rivals.sjd_coupled import couple
from lab.shapes import num_sibling_nodes


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of sjd-pac and its rule."""
    return window_and_rule(setup, couple, paths=product_tree(setup.shape))


def product_tree(shape: TreeShape) -> Paths:
    """Returns the paths of a main chain of shape.depth codes with K = shape.width candidates at each of its
    first positions. As many positions branch as the budget allows. Width 1 gives the chain alone.

    This is the tree of SJD-PAC (2603.18599). Most drafts are rejected at the first open positions, so the
    window begins as a K-ary tree: below every candidate of one position stand K candidates of the next, which
    recursive rejection tries in turn. They are the code X of the position and samples from its q without
    replacement. Below the first candidates of the branching positions the window goes on as a chain. The
    paper uses K = 4, two branching positions ("depth 3", because it counts the root) and 64 nodes.
    """
    length = min(shape.depth, shape.budget)
    spare, width = shape.budget - length, shape.width
    positions = max(n for n in range(length + 1) if num_sibling_nodes(width, n) <= spare)
    branches = [path for n in range(1, positions + 1) for path in product(range(width), repeat=n)]
    return (*branches, *chain(length)[positions:])
