"""Hybrid drafting: the EAGLE drafter knows the newest code, the candidate cache reaches far; a tree of both.

Where self-drafting is weak, at the first open position, the drafter has a distribution of its own. How much
it weighs there is learned, and at first it is nothing; further ahead it adds nothing (docs/LOG.md).
Dimensions: B images, L levels, K candidates a position, W weights, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.candidates import CandidateCache, Candidates, grow_chains
from adt_tree.eagle import EagleProposer, grow_dynamic
from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, NoiseBelow, Prefix
from adt_tree.sampling import Sampling
from adt_tree.tree import BatchShapes, DraftTree, root_only_tree
from adt_tree.verify import Verdict

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0)  # of the drafter's log-probabilities beside the cached ones
MARGIN = 4.0  # standard deviations by which a weight must lead: it is looked at after every step
LEAST_LOG_Q = -12.0  # what the drafter's filters drop may still be the target's choice


class DrafterWeight:
    """Which of WEIGHTS the drafter has at the first level: the one whose best code was the target's choice
    more often than that of the cache alone, by MARGIN; 0 until there is one.

    So drafts are those of self-drafting unless the drafter has bettered them. State: two counts per weight,
    shared by all images.
    """

    def __init__(self, device: torch.device) -> None:
        self.weights = torch.tensor(WEIGHTS, device=device)
        self.wins, self.losses = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    @property
    def value(self) -> Tensor:
        """The weight [] in force; counts of a fair coin of n throws lie apart by sqrt(n)."""
        lead = self.wins - self.losses - MARGIN * (self.wins + self.losses).sqrt()
        return self.weights.gather(0, lead.argmax(dim=0, keepdim=True))[0]

    def observe(self, guesses: Tensor, drafted: Tensor, choice: Tensor) -> None:
        """Count images that drafted [B, 1] by guesses [B, W], the best first code by each weight, which
        guesses otherwise than weight 0 does. choice [B]: the target's own after the root, whatever a relaxed
        rule committed in its place."""
        right = (guesses == choice[:, None]) & drafted
        self.wins += (right & ~right[:, :1]).sum(dim=0)
        self.losses += (~right & right[:, :1]).sum(dim=0)


class HybridProposer:
    """Self-drafting whose first level the drafter has a say in."""

    def __init__(self, drafter: Drafter, sampling: Sampling, cache: CandidateCache, slots: int) -> None:
        self.cache, self.weight = cache, DrafterWeight(drafter.device)
        self.eagle = EagleProposer(drafter, sampling, grow_dynamic, slots)  # for its state at the root
        self._guesses: Tensor | None = None  # [B, W] of the newest tree; None: it drafted nothing

    def calls(self, shape: TreeShape) -> int:
        """One pass over what was committed, whatever the shape."""
        return 1

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Both take the image."""
        self.eagle.prefill(slot, prompt, prefix, code)
        self.cache.prefill(slot, code)

    def release(self, slot: int) -> None:
        """Both let it go."""
        self.eagle.release(slot)
        self.cache.release(slot)

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """Chains whose first level is the best of a weighted product of both distributions."""
        state, self._guesses = self.eagle.read_committed(shapes, last_codes, noise_below, committed), None
        if shapes.empty:
            return root_only_tree(last_codes)
        cached = self.cache.candidates(shapes.depth, shapes.width)
        first, self._guesses = self._first_level(cached, state.log_q, state.log_q + state.noise[:, 0])
        parts = ((first.codes, cached.codes), (first.confidence, cached.confidence))
        found = Candidates(*(torch.cat((own[:, None], far[:, 1:]), dim=1) for own, far in parts))
        return grow_chains(found, shapes, last_codes)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Weigh the drafter anew; both learn."""
        if self._guesses is not None:
            self.weight.observe(self._guesses, tree.valid[:, 1:2], perturbed[:, 0].argmax(dim=-1))
        self.cache.observe(tree, perturbed, verdict)
        self.eagle.observe(tree, perturbed, features, verdict)

    def _first_level(self, cached: Candidates, log_q: Tensor, perturbed: Tensor) -> tuple[Candidates, Tensor]:
        """The K best codes of the first position, [B, K], by log s + weight * log q, and the best [B, W] by
        each of WEIGHTS. s is the cache's confidence, of codes it does not name that of the last one it names.
        A code both name stands once. While the weight is 0 the cache's own stand.

        log_q [B, V]: the drafter's after the root; perturbed: the same under the position's noise, whose best
        are the drafter's candidates.
        """
        codes, confidence, weight = cached.codes[:, 0], cached.confidence[:, 0], self.weight.value
        drafted = perturbed.topk(codes.shape[1], dim=-1).indices
        known = confidence.isfinite()
        twice = ((drafted[:, None] == codes[..., None]) & known[..., None]).any(dim=1)
        unnamed = confidence.masked_fill(~known, 0.0).amin(dim=1, keepdim=True)
        code = torch.cat((codes, drafted), dim=1)
        named = torch.cat((confidence, unnamed.masked_fill(twice, float("-inf"))), dim=1)
        drafts = log_q.gather(1, code).clamp(min=LEAST_LOG_Q)
        by_weight = named[:, None] + self.weight.weights[:, None] * drafts[:, None]
        guesses = code.gather(1, by_weight.argmax(dim=2))
        score = (named + weight * drafts).log_softmax(dim=-1)
        value, best = score.topk(codes.shape[1], dim=-1)
        both = torch.where(weight > 0, code.gather(1, best), codes)
        return Candidates(both, torch.where(weight > 0, value, confidence)), guesses
