"""Hybrid drafting: the EAGLE drafter knows the newest code, stale codes reach far; one pool of both.

Where self-drafting is weak, at the first open position, the drafter has a law of its own. How far it is
believed is learned, and at first it is not; further ahead it adds nothing (docs/LOG.md).
Dimensions: B images, L levels, K candidates a position, W weights, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.calibrate import BOTH, DRAFTER, Calibration
from adt_tree.candidates import CandidateCache, Candidates, grow_chains
from adt_tree.eagle import EagleProposer, Stem
from adt_tree.passes import DIRECT, Passes
from adt_tree.policy import TreeShape
from adt_tree.roles import Below, Drafter, Prefix
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree, root_only_tree
from adt_tree.verify import Verdict

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0)  # of the drafter's log-law beside the stale one's
MARGIN = 4.0  # standard deviations by which a weight must lead: it is looked at after every cycle
LEAST_LOG_Q = -12.0  # what the drafter's filters drop may still be the target's choice


class Belief:
    """Which of WEIGHTS the drafter's law has at the first level: the one whose best code was the target's
    choice more often than that of the stale law alone, by MARGIN; 0 until there is one.

    So drafts are those of self-drafting unless the drafter has bettered them. State: two counts a
    weight, shared by all images.
    """

    def __init__(self, device: torch.device) -> None:
        self.weights = torch.tensor(WEIGHTS, device=device)
        self.wins, self.losses = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    @property
    def weight(self) -> Tensor:
        """The weight [] believed in; counts of a fair coin of n throws lie apart by sqrt(n)."""
        lead = self.wins - self.losses - MARGIN * (self.wins + self.losses).sqrt()
        return self.weights.gather(0, lead.argmax(dim=0, keepdim=True))[0]

    def observe(self, tree: DraftTree, choice: Tensor) -> None:
        """Count the trees whose first code a weight guesses otherwise than none does. choice [B]: the
        target's own after the root, whatever a relaxed rule committed in its place."""
        if tree.guesses is None:
            return
        right = (tree.guesses == choice[:, None]) & tree.valid[:, 1:2]
        self.wins += (right & ~right[:, :1]).sum(dim=0)
        self.losses += (~right & right[:, :1]).sum(dim=0)


class HybridProposer:
    """Self-drafting (see SelfDraftProposer) whose first level the drafter has a say in."""

    def __init__(
        self,
        drafter: Drafter,
        sampling: Sampling,
        stale: CandidateCache,
        calibration: Calibration,
        slots: int,
        passes: Passes = DIRECT,
    ) -> None:
        """passes: who runs the growth and what moves it on."""
        self.stale, self.calibration, self.belief = stale, calibration, Belief(drafter.device)
        self.passes = passes
        growth = HybridGrowth(stale, calibration, self.belief)
        self.eagle = EagleProposer(drafter, sampling, growth, slots, passes)

    def calls(self, shape: TreeShape) -> int:
        """See Proposer: one pass over what was committed, whatever the shape."""
        return 1

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        self.eagle.prefill(slot, prompt, prefix, code)
        self.stale.prefill(slot, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self.eagle.release(slot)
        self.stale.release(slot)

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        return self.eagle.propose(shapes, roots, below, committed)

    def observe(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        self.calibration.observe(tree, verdict)
        self.belief.observe(tree, perturbed[:, 0].argmax(dim=-1))
        self.stale.observe(tree, perturbed, verdict)
        self.eagle.observe(tree, log_p, perturbed, features, verdict)


class HybridGrowth:
    """Stale chains whose first level is the best of a product of both laws, once the drafter is believed.

    A node's score is the sum of log acceptance rates: on the first level, if the drafter has a say in it, as
    the calibration has them by source, rank and confidence; else the stale laws' own confidences, which
    correcting made no better (docs/LOG.md).
    """

    def __init__(self, stale: CandidateCache, calibration: Calibration, belief: Belief) -> None:
        self.stale, self.calibration, self.belief = stale, calibration, belief

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth."""
        bounds = stem.bounds
        if min(bounds) == 0:
            return root_only_tree(stem.roots)
        weight = self.belief.weight
        found, guesses = self.candidates(stem, weight)
        rank = torch.arange(bounds[2], device=stem.roots.device)
        bins = self.calibration.bins(found.source, rank, found.confidence)
        bins[:, 1:] = self.calibration.unbinned
        bins[:, 0].masked_fill_(weight == 0, self.calibration.unbinned)
        gain = self.calibration.log_rate(bins, found.confidence)
        tree = grow_chains(found, gain, bins, stem.limits, bounds, stem.roots)
        return replace(tree, guesses=guesses)

    def candidates(self, stem: Stem, weight: Tensor) -> tuple[Candidates, Tensor]:
        """What trees on that stem, none of whose bounds is 0, are grown from by that weight [], and the best
        code [B, W] of the first position by each of WEIGHTS."""
        ahead = self.stale.candidates(*stem.bounds[1:])
        first, guesses = self._first(ahead, stem.log_q, stem.log_q + stem.gumbel[:, 0], weight)
        parts = (
            (first.codes, ahead.codes),
            (first.confidence, ahead.confidence),
            (first.source, ahead.source),
        )
        merged = [
            torch.cat((torch.where(weight > 0, own, all_[:, 0])[:, None], all_[:, 1:]), dim=1)
            for own, all_ in parts
        ]
        return Candidates(*merged), guesses

    def _first(
        self, ahead: Candidates, log_q: Tensor, perturbed: Tensor, weight: Tensor
    ) -> tuple[Candidates, Tensor]:
        """The K best codes of the first position, [B, K], by log s + weight * log q, s being the stale law's
        confidence, of codes it does not name that of the last one it names; and the best code [B, W] by each
        of WEIGHTS. A code both name stands once.

        log_q [B, V]: the drafter's law after the root; perturbed: the same under the position's noise,
        whose best are the drafter's candidates.
        """
        stale, said = ahead.codes[:, 0], ahead.confidence[:, 0]
        width = stale.shape[1]
        drafted = perturbed.topk(width, dim=-1).indices
        known = said.isfinite()
        same = (drafted[:, None] == stale[..., None]) & known[..., None]  # [B, stale, drafted]
        unnamed = said.masked_fill(~known, 0.0).amin(dim=1, keepdim=True)
        code = torch.cat((stale, drafted), dim=1)
        named = torch.cat((said, unnamed.masked_fill(same.any(dim=1), float("-inf"))), dim=1)
        drafts = log_q.gather(1, code).clamp(min=LEAST_LOG_Q)
        by_weight = named[:, None] + self.belief.weights[:, None] * drafts[:, None]
        guesses = code.gather(1, by_weight.argmax(dim=2))
        score = named + weight * drafts
        value, best = score.log_softmax(dim=-1).topk(width, dim=-1)
        source = torch.where(same.any(dim=2), BOTH, ahead.source[:, 0])
        source = torch.cat((source, torch.full_like(drafted, DRAFTER)), dim=1)
        return Candidates(code.gather(1, best), value, source.gather(1, best)), guesses
