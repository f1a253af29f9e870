"""The rivals that are a Jacobi window with a published tail and rule.

sjd (SJD, 2410.01699) samples the codes after the first rejected draft anew, and sjd-coupled (2510.24211)
keeps as many of them as it can. sjd-pac (SJD-PAC, 2603.18599) is sjd-coupled with several candidates for the
first positions. cool-sjd is sjd by the rule of cool-sd (2601.09212). The paper has that rule on EAGLE-1's
drafts, so this variant is ours, and it is not lossless: the level of a draft is its place in the window, so
most of a long window is judged more strictly than in sjd.
"""

from __future__ import annotations

from itertools import product

import torch.nn.functional as F
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.policy import TreeShape
from adt_tree.static_trees import Paths, chain
from adt_tree.verify import Rule
from lab.rivals.cool_sd import annealed
from lab.rivals.jacobi_window import JacobiWindow, Judged, sample, window_and_rule
from lab.shapes import num_sibling_nodes


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of a method of this file and its rule."""
    name = setup.method.name
    tail = couple if name in ("sjd-coupled", "sjd-pac") else resample
    judge = annealed(setup).judge if name == "cool-sjd" else None
    return window_and_rule(setup, tail, judge, product_tree(setup.shape) if name == "sjd-pac" else None)


def resample(judged: Judged) -> Tensor:
    """Samples a new code from p after every node.

    It takes the uniform of `recovered` again. That is sound: a step uses one `recovered`, at the position
    after the last accepted draft, and the new codes only at later positions.
    """
    return sample(judged.p, judged.chances)


def couple(judged: Judged) -> Tensor:
    """Keeps as many codes after the first rejected draft as it can, as coupled SJD does (2510.24211).

    A code that is sampled anew nearly always changes, and then the p of all positions after it is out of
    date. The maximal coupling samples a new code X' from p in such a way that it most often equals the old
    code X: it keeps X with probability min(1, p(X) / q(X)), and otherwise samples X' from the residual. So
    Pr[X' = X] = 1 - TV(p, q). That is the rule of verification, applied at every position, and not only up to
    the first rejection. A code that stays is also a sample of the p of this pass, which is its q in the next.
    """
    tree = judged.tree
    # An accepted node's code replaces `recovered` after its parent; rejected ones write to an extra column.
    parents = tree.parents[:, 1:].masked_fill(~judged.hit[:, 1:], tree.nodes)
    return F.pad(judged.recovered, (0, 1)).scatter(1, parents, tree.codes[:, 1:])[:, :-1]


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
