"""Coupled SJD (2510.24211): keeps as many codes after the first rejected draft as it can."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.verify import Rule
from lab.rivals.jacobi_window import JacobiWindow, Judged, window_and_rule


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of sjd-coupled and its rule."""
    return window_and_rule(setup, couple)


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
