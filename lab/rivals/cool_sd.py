"""Cool-SD (2601.09212): eagle-1 that relaxes the first levels of a tree most. It is not lossless.

A draft at level i of L is accepted with probability min(1, w_i p / q), where w_i = delta exp(-nu i - mu), and
mu is such that the mean of w_1, ..., w_L is delta. A rejection leaves the distribution that the paper proves
best, norm(max(p - min(q, w_i p), 0)); where w_i >= 1, it is the usual one. With delta = 1 and nu = 0 the two
methods are equal. No code is published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.proposers.eagle import EagleProposer, proposer
from adt_tree.static_trees import StaticTree
from adt_tree.tree import DraftTree, Topology
from adt_tree.verify import Rejection, Rule
from lab.settings import Annealing


def make(setup: MethodOnModel) -> tuple[EagleProposer, Rule]:
    """Returns the proposer of cool-sd, that of eagle-1 under rejection, and its rule."""
    tree = setup.method.tree
    assert isinstance(tree, StaticTree)
    topology = Topology(tree.paths)
    rule = setup.rule(topology) if setup.method.greedy else annealed(setup)
    return proposer(setup, topology, keep_q=not setup.method.greedy), rule


def annealed(setup: MethodOnModel) -> Rejection:
    """Returns the rule of cool-sd. At temperature 0 it is the exact one."""
    annealing, num_codes = setup.method.relaxed_rule, setup.batch.num_codes
    assert isinstance(annealing, Annealing)
    if setup.method.greedy:
        return Rejection(num_codes, static=True)
    return Annealed(num_codes, weights_of(annealing, setup.shape.depth).to(setup.batch.device))


class Annealed(Rejection):
    """The rule of cool-sd, for static trees."""

    def __init__(self, num_codes: int, weights: Tensor) -> None:
        """weights [L]: w_i."""
        super().__init__(num_codes, static=True)
        self._weights = weights

    def _weigh(
        self, tree: DraftTree, child: Tensor, p: Tensor, q: Tensor, chance: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = self._weights[tree.depths.gather(1, child) - 1]
        return weight * chance, torch.minimum(q, weight[..., None] * p)


def weights_of(annealing: Annealing, levels: int) -> Tensor:
    """Returns the weights w_i [L] of the levels 1 to L."""
    falling = torch.exp(-annealing.cool_nu * torch.arange(levels))
    return annealing.cool_delta * falling / falling.mean()
