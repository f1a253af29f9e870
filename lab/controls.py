"""The controls of bench: engines whose rule ignores the target."""

from __future__ import annotations

import torch
from torch import Tensor

from adt_tree.engine import Engine, one_loop
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.roles import Model
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict, children, verdict_from_hits
from lab.settings import Control


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """See adt_tree.engine.build."""
    control = method.relaxed
    assert isinstance(control, Control)
    rule = ControlRule(Noise(model.num_codes, silent=method.greedy), control.accept == "accept-all")
    return one_loop(model, method, slots, max_prompt, rule)


class ControlRule(Coupled):
    """Accepts no draft, or the first child of every node.

    The code after the path and the first code of an image are still the target's choice.
    """

    def __init__(self, noise: Noise, accept: bool) -> None:
        """accept: true to accept the first child of every node, false to accept no draft."""
        super().__init__(noise)
        self.accept = accept

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        hit = torch.zeros_like(tree.valid)
        if self.accept and tree.width:
            child, exists = next(iter(children(tree)))
            hit |= torch.zeros_like(hit).scatter(1, child, exists)
        hit[:, 0] = True
        return verdict_from_hits(tree, hit, perturbed.argmax(dim=-1))
