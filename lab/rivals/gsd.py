"""GSD, grouped speculative decoding (2508.07747): sjd that counts the probability of a group of codes around
a draft. It is not lossless.

The group of a draft x consists of those of the G codes next to it in the order of p that have about the same
probability and a similar input embedding. x is accepted with probability min(1, p(group) / q(group)), and x
itself is committed. A rejection leaves the same residual as in sjd. With G = 1 the two methods are equal.

Dimensions: B images, L positions, N = L + 1 nodes, V codes, G members, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.tree import DraftTree
from adt_tree.verify import Rejection, Rule
from lab.rivals.jacobi_window import JacobiWindow, Judge, decided, window_and_rule
from lab.rivals.windows import resample
from lab.settings import Groups

MAX_ROWS = 2048  # embeddings whose distances median_distance() computes


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of gsd and its rule."""
    groups, exact = setup.method.relaxed_rule, Rejection(setup.batch.num_codes, static=True)
    assert isinstance(groups, Groups)
    return window_and_rule(setup, resample, GroupJudge(groups, setup.model.embeddings, exact.judge))


def median_distance(embeddings: Tensor) -> float:
    """Returns the median of the squared distances between embeddings [V, D], or between evenly spaced ones.

    The released threshold, 0.5, means something for the embeddings of Lumina-mGPT alone; this one is ours.
    """
    some = embeddings[:: -(-len(embeddings) // MAX_ROWS)].float()
    return float(torch.pdist(some).square().median())


class GroupJudge:
    """The Judge of gsd, for chains."""

    def __init__(self, groups: Groups, embeddings: Tensor, exact: Judge) -> None:
        """embeddings [V, D]: the rows by which the model reads its codes. exact: the rule of sjd."""
        self._embeddings, self._exact, self._gap = embeddings, exact, groups.gsd_gap
        distance = groups.gsd_distance
        self._distance = median_distance(embeddings) if distance is None else distance
        self._offsets = torch.arange(groups.gsd_group, device=embeddings.device) - groups.gsd_group // 2

    def __call__(self, tree: DraftTree, p: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        p_above, codes = p[:, :-1], tree.codes[:, 1:, None]  # in a chain the parent of node n is node n - 1
        group, members = self._group(p_above, codes)
        ratio = p_above.gather(-1, group).masked_fill(~members, 0.0).sum(dim=-1)
        if tree.q is not None:
            ratio = ratio / tree.q[:, :-1].gather(-1, group).masked_fill(~members, 0.0).sum(dim=-1)
        return decided(self._exact, tree, p, F.pad(chances[:, 1:] <= ratio, (1, 0)))

    def _group(self, p: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the G codes around each of codes [B, L, 1], [B, L, G], and which of them are members.

        The draft itself is number G // 2, and always a member. At the ends of the order groups are smaller.
        """
        order = p.argsort(dim=-1, stable=True)
        rank = (order == codes).int().argmax(dim=-1, keepdim=True) + self._offsets
        group = order.gather(-1, rank.clamp(0, p.shape[-1] - 1))
        gap = (p.gather(-1, group) - p.gather(-1, codes)).abs()
        rows = F.embedding(group, self._embeddings).float() - F.embedding(codes, self._embeddings).float()
        near = (gap < self._gap) & (rows.square().sum(dim=-1) < self._distance)
        return group, (rank >= 0) & (rank < p.shape[-1]) & (near | (self._offsets == 0))
