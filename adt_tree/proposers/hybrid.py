"""Hybrid drafting: the EAGLE drafter knows the newest code, self-drafting reaches far; a tree of both.

Self-drafting is weak at the first open position, and there only where it is stale: the target read the
position, but never below the very code now before it. There the drafter's word helps, elsewhere as much of it
harms (docs/LOG.md). Dimensions: B images, L levels, K candidates a position, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.proposers.candidates import Candidates, grow_chains
from adt_tree.proposers.eagle import EagleProposer
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.roles import NoiseBelow, Prefix
from adt_tree.tree import BatchShapes, DraftTree, root_only_tree
from adt_tree.verify import Verdict

LEAST_LOG_Q = -12.0  # what the drafter's filters drop may still be the target's choice


class HybridProposer:
    """Self-drafting whose first level the drafter has a say in where what was read there is stale."""

    def __init__(self, own: SelfDraftProposer, eagle: EagleProposer) -> None:
        """eagle: for its state at the root; it grows no trees."""
        self.own, self.eagle = own, eagle

    def calls(self, shape: TreeShape) -> int:
        """One pass over what was committed, whatever the shape."""
        return 1

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Both take the image."""
        self.eagle.prefill(slot, prompt, prefix, code)
        self.own.prefill(slot, prompt, prefix, code)

    def release(self, slot: int) -> None:
        """Both let it go."""
        self.eagle.release(slot)
        self.own.release(slot)

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """Chains whose first level, where it is stale, is the best of the product of both distributions, and
        whose further levels are what was read below its best."""
        state = self.eagle.read_committed(shapes, last_codes, noise_below, committed)
        if shapes.empty:
            return root_only_tree(last_codes)
        cached = self.own.candidates(1, shapes.width)
        first = joint(cached, state.log_q, state.log_q + state.noise[:, 0], self.own.stale())
        far = self.own.candidates(shapes.depth, shapes.width, first.codes[:, 0, 0])
        parts = ((first.codes, far.codes), (first.confidence, far.confidence))
        found = Candidates(*(torch.cat((own, all_[:, 1:]), dim=1) for own, all_ in parts))
        return grow_chains(found, shapes, last_codes)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Both learn."""
        self.own.observe(tree, perturbed, features, verdict)
        self.eagle.observe(tree, perturbed, features, verdict)


def joint(cached: Candidates, log_q: Tensor, perturbed: Tensor, stale: Tensor) -> Candidates:
    """The K best codes of one position by log s + log q where stale [B], else the cached ones themselves.

    s is the cache's confidence, of codes it does not name that of the last one it names. A code both name
    stands once. cached: one level; log_q [B, V]: the drafter's there; perturbed: the same under the
    position's noise, whose best are the drafter's candidates.
    """
    codes, confidence = cached.codes[:, 0], cached.confidence[:, 0]
    drafted = perturbed.topk(codes.shape[1], dim=-1).indices
    known = confidence.isfinite()
    twice = ((drafted[:, None] == codes[..., None]) & known[..., None]).any(dim=1)
    unnamed = confidence.masked_fill(~known, 0.0).amin(dim=1, keepdim=True)
    code = torch.cat((codes, drafted), dim=1)
    named = torch.cat((confidence, unnamed.masked_fill(twice, float("-inf"))), dim=1)
    score = (named + log_q.gather(1, code).clamp(min=LEAST_LOG_Q)).log_softmax(dim=-1)
    value, best = score.topk(codes.shape[1], dim=-1)
    there = stale[:, None]
    both = torch.where(there, code.gather(1, best), codes), torch.where(there, value, confidence)
    return Candidates(*(part[:, None] for part in both))
