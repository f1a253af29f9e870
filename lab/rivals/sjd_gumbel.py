"""The Gumbel-coupled Jacobi window (2510.24211): a chain of the codes that the target chose in the last pass.

With the target's noise G fixed per position, argmax(log p + G) at a position is a sample of p, and it
changes between passes only where p changes enough. So the window keeps the choices of the last pass as
drafts, and the coupled rule verifies them. Self-drafting begins from the same idea; it adds a history of
earlier passes and alternatives beside the chain.

Dimensions: B images, N nodes, L positions, V codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.policy import TreeShape
from adt_tree.proposers.neighbours import Neighbours
from adt_tree.roles import Batch, Prefix, StepStart
from adt_tree.tree import BatchShapes, DraftTree
from adt_tree.verify import Rule, Verdict


def make(setup: MethodOnModel) -> tuple[GumbelWindow, Rule]:
    """Returns the proposer of sjd-gumbel and its rule."""
    return GumbelWindow(setup.shape.depth, setup.batch, Neighbours.of(setup)), setup.rule()


class GumbelWindow:
    """The proposer of sjd-gumbel, with one window of codes [B, L] per slot."""

    def __init__(self, length: int, batch: Batch, neighbours: Neighbours) -> None:
        """length: L. neighbours: of these images, to copy to unscored positions."""
        device = batch.device
        self._run, self._neighbours = batch.run, neighbours
        self._offsets = torch.arange(length, device=device)
        self._codes = torch.zeros(batch.slots, length, dtype=torch.int64, device=device)

    def calls(self, shape: TreeShape) -> int:
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        self._neighbours.begin(slot, code)
        rows = slice(slot, slot + 1)
        at = self._neighbours.ahead(torch.ones_like(self._offsets[:1]), self._offsets)
        fresh = torch.ones_like(at, dtype=torch.bool)
        self._codes[rows] = self._neighbours.fill(at, self._codes[rows], fresh, rows)[0]

    def release(self, slot: int) -> None: ...

    def propose(self, start: StepStart) -> DraftTree:
        return self._run(self._chain, start.shapes.all_levels, start.last_codes)

    def _chain(self, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
        number = torch.arange(shapes.depth + 1, device=last_codes.device)
        depths = number.expand(len(last_codes), -1)
        return DraftTree(
            codes=torch.cat((last_codes[:, None], self._codes[:, : shapes.depth]), dim=1),
            parents=(depths - 1).clamp(min=0),
            depths=depths,
            ancestors=(number <= number[:, None]).expand(len(last_codes), -1, -1),
            valid=depths <= shapes.limits[:, :1],
            depth=shapes.depth,
            width=1,
            leafy_chain=True,
        )

    def observe(
        self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict, positions: Tensor
    ) -> None:
        self._run(self._advance, tree, perturbed, verdict, positions)

    def _advance(self, tree: DraftTree, perturbed: Tensor, verdict: Verdict, positions: Tensor) -> None:
        """Moves the windows on, so that they begin after the committed codes.

        Node n chose the code n positions after the first open one, so after `count` commits the choice for
        level l of the window is that of node count + l.
        """
        self._neighbours.commit(positions, verdict.codes, verdict.count)
        node = verdict.count[:, None] + self._offsets
        inside = node < tree.nodes
        node = node.masked_fill(~inside, 0)
        scored = inside & tree.valid.gather(1, node)
        at = self._neighbours.ahead(positions + verdict.count, self._offsets)
        choice = perturbed.argmax(dim=-1).gather(1, node)
        self._codes.copy_(self._neighbours.fill(at, choice, ~scored)[0])
