"""Coupled SJD (2510.24211): behind the first rejected draft every code stays that can.

Codes drawn anew are nearly always others, and whatever was read behind them is lost. The maximal coupling
keeps X with the greatest probability that leaves X' ~ p: it is min(1, p / q) with the residual, the rule of
verification, at every position without a break. So Pr[X' = X] = 1 - TV(p, q).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from adt_tree.rivals.window import Judged


def couple(judged: Judged) -> Tensor:
    """X' [B, N] after each node: its accepted child's code, or else the draw from the residual.

    X' follows this pass's p, which is its q in the next pass even where X was kept.
    """
    tree = judged.tree
    parents = tree.parents[:, 1:].masked_fill(~judged.hit[:, 1:], tree.nodes)
    return F.pad(judged.drawn, (0, 1)).scatter(1, parents, tree.codes[:, 1:])[:, :-1]
