"""Bounds of a measurement: rules that accept no draft, or all of them, whatever the target says.

What they generate is no image of the model. They say what a step costs and what perfect drafts would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adt_tree.noise import Noise
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict, children, verdict_from_hits

CONTROLS = ("accept-none", "accept-all")


class Control:
    """A rule that accepts no draft (accept-none) or the first child of every node (accept-all)."""

    def __init__(self, noise: Noise, accept: bool) -> None:
        self.noise, self.accept = noise, accept
        self._exact = Coupled(noise)

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The first code of an image is the target's own."""
        return self._exact.choose(log_p, seeds, positions)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Walk the first children, or none; the code after the last node is the target's own."""
        hit = torch.zeros_like(tree.valid)
        if self.accept and tree.width:
            child, exists = next(iter(children(tree)))
            hit |= torch.zeros_like(hit).scatter(1, child, exists)
        hit[:, 0] = True
        return verdict_from_hits(tree, hit, perturbed.argmax(dim=-1))
