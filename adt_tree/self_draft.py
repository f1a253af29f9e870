"""Self-drafting: the target's own stale choices as draft trees (coupled Jacobi trees); no drafter network.

With position-keyed noise the choice at a position is a deterministic function of its prefix, so what the
target chose behind a rejected node is a good draft for the next cycle: its prefix has changed at one place,
and for images that decays within a few cells. Sources: SJD 2410.01699, SCD 2510.24211 (the coupling),
SJD-PAC 2603.18599 (trees). Only the coupled rule may verify such trees; it is exact whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adt_tree.candidates import CandidateCache, grow_chains
from adt_tree.passes import DIRECT, Passes
from adt_tree.policy import TreeShape, greatest
from adt_tree.roles import Below, Prefix
from adt_tree.transfer import to_device
from adt_tree.tree import DraftTree, root_only_tree
from adt_tree.verify import Verdict


class SelfDraftProposer:
    """A main chain of the best stale code a position, and alternatives by summed confidence.

    A shape's depth is the length of the main chain, its width the candidates a position, its budget all
    drafted nodes. The confidences are the stale laws' own: correcting them by observed rates cost acceptance
    (docs/LOG.md).
    """

    def __init__(self, stale: CandidateCache, passes: Passes = DIRECT) -> None:
        """passes: who runs the growth and what moves it on."""
        self.stale, self.passes = stale, passes

    def calls(self, shape: TreeShape) -> int:
        """No drafter passes."""
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        self.stale.prefill(slot, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self.stale.release(slot)

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        bounds = greatest(shapes)
        if min(bounds) == 0:
            return root_only_tree(roots)
        limits = to_device([(s.depth, s.width, s.budget) for s in shapes], roots.device)
        return self.passes(self._grow, bounds, limits, roots)

    def _grow(self, budget: int, depth: int, width: int, limits: Tensor, roots: Tensor) -> DraftTree:
        """A tree per slot, no shape larger than budget, depth and width."""
        found = self.stale.candidates(depth, width)
        return grow_chains(found, found.confidence, None, limits, (budget, depth, width), roots)

    def observe(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        self.stale.observe(tree, perturbed, verdict)
