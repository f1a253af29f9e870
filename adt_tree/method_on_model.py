"""One method on one model: what the module of a method needs to make its proposer and its rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from adt_tree.lantern import Relaxation
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.policy import TreeShape
from adt_tree.roles import Batch, Model, Target
from adt_tree.tree import Topology
from adt_tree.verify import Coupled, GreedyRelaxed, Rejection, Rule


@dataclass(frozen=True, slots=True)
class MethodOnModel:
    """The argument of `make` in the modules that METHODS names."""

    model: Model
    method: Method
    target: Target
    batch: Batch  # of the trees that are drafted: the target itself where every image has one
    shape: TreeShape  # the largest tree that the policy can ask for

    def rule(self, topology: Topology | None = None) -> Rule:
        """Returns the verification rule that the method names, for static trees of one topology or for
        dynamic ones. Greedy decoding without LANTERN is the coupled rule without noise."""
        model, method = self.model, self.method
        relaxation = None
        if method.lantern is not None:
            k = method.lantern.neighbours(model.num_codes)
            table = Path(method.lantern.table) if method.lantern.table else None
            relaxation = Relaxation(model.nearest(k + 1, table), k, method.lantern.delta)
        if method.greedy and relaxation is not None:
            order = None
            if topology is not None:
                order = torch.tensor(topology.row_order, device=self.batch.device)
            return GreedyRelaxed(model.num_codes, relaxation, order)
        if method.greedy or method.verify == "coupled":
            return Coupled(Noise(model.num_codes, silent=method.greedy), relaxation)
        static, reference = topology is not None, method.rules == "reference"
        return Rejection(model.num_codes, static, relaxation, reference)
