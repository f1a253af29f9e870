"""Self-drafting: the target's own earlier choices as draft trees (coupled Jacobi trees); no drafter network.

With position-keyed noise the choice at a position is a deterministic function of its prefix, so what the
target chose behind a rejected node is a good draft for the next step: its prefix has changed at one place,
and for images that decays within a few cells. Sources: SJD 2410.01699, SCD 2510.24211 (the coupling),
SJD-PAC 2603.18599 (trees). Only the coupled rule may verify such trees; it is exact whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adt_tree.candidates import CandidateCache, grow_chains
from adt_tree.policy import TreeShape
from adt_tree.roles import NoiseBelow, Prefix
from adt_tree.tree import BatchShapes, DraftTree, root_only_tree
from adt_tree.verify import Verdict


class SelfDraftProposer:
    """A main chain of the best cached code per position, and alternatives by summed confidence.

    A shape's depth is the length of the main chain, its width the candidates per position, its budget all
    drafted nodes. The confidences are the cached distributions' own: correcting them by observed rates cost
    acceptance (docs/LOG.md).
    """

    def __init__(self, cache: CandidateCache) -> None:
        self.cache = cache

    def calls(self, shape: TreeShape) -> int:
        """No drafter passes."""
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Nothing is known of a new image but its first code."""
        self.cache.prefill(slot, code)

    def release(self, slot: int) -> None:
        """The slot idles."""
        self.cache.release(slot)

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """A chain with leaves per slot."""
        if shapes.empty:
            return root_only_tree(last_codes)
        return grow_chains(self.cache.candidates(shapes.depth, shapes.width), shapes, last_codes)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Keep what the target says at every node, accepted or not."""
        self.cache.observe(tree, perturbed, verdict)
