"""Hybrid drafting: the EAGLE drafter knows the newest code, stale codes reach far; one pool of both.

Where self-drafting is weak, at the first open position, if its law was read below a code that proved wrong,
the drafter has a law of its own; further ahead it adds nothing, and a weak one nothing at all (docs/LOG.md).
Dimensions: B images, L levels, K candidates a position, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.calibrate import BOTH, DRAFTER, Calibration
from adt_tree.passes import DIRECT, Passes
from adt_tree.policy import TreeShape
from adt_tree.propose import EagleProposer, Stem
from adt_tree.roles import Ahead, Drafter, Prefix
from adt_tree.sampling import Sampling
from adt_tree.stale import Candidates, StaleCodes, grow_chains
from adt_tree.tree import DraftTree, lone_roots
from adt_tree.verify import Verdict

DRAFTER_WEIGHT = 0.25  # of the drafter's log-law beside the stale one's
LEAST_LOG_Q = -12.0  # what the drafter's filters drop may still be the target's choice


class HybridProposer:
    """Self-drafting (see JacobiProposer) whose first level the drafter has a say in."""

    def __init__(
        self,
        drafter: Drafter,
        sampling: Sampling,
        stale: StaleCodes,
        calibration: Calibration,
        slots: int,
        passes: Passes = DIRECT,
    ) -> None:
        """passes: who runs the growth."""
        self.stale, self.calibration = stale, calibration
        self.eagle = EagleProposer(drafter, sampling, HybridGrowth(stale, calibration), slots, passes)

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

    def propose(self, shapes: Sequence[TreeShape], roots: Tensor, ahead: Ahead, reach: int) -> DraftTree:
        """See Proposer."""
        return self.eagle.propose(shapes, roots, ahead, reach)

    def observe(
        self, tree: DraftTree, log_p: Tensor, noisy: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        self.calibration.observe(tree, verdict)
        self.stale.observe(tree, noisy, verdict)
        self.eagle.observe(tree, log_p, noisy, features, verdict)


class HybridGrowth:
    """Stale chains whose first level is the best of a product of both laws.

    A node's score is the sum of log acceptance rates: on the first level as the calibration has them by
    source, rank and confidence; below, the stale laws' own confidences, which correcting made no better
    (docs/LOG.md).
    """

    def __init__(self, stale: StaleCodes, calibration: Calibration) -> None:
        self.stale, self.calibration = stale, calibration

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth."""
        bounds = stem.bounds
        if min(bounds) == 0:
            return lone_roots(stem.roots)
        found = self.candidates(stem)
        rank = torch.arange(bounds[2], device=stem.roots.device)
        bins = self.calibration.bins(found.source, rank, found.confidence)
        bins[:, 1:] = self.calibration.unbinned
        gain = self.calibration.log_rate(bins, found.confidence)
        return grow_chains(found, gain, bins, stem.limits, bounds, stem.roots)

    def candidates(self, stem: Stem) -> Candidates:
        """What trees on that stem, none of whose bounds is 0, are grown from."""
        ahead = self.stale.candidates(*stem.bounds[1:])
        first = at_first_level(ahead, stem.log_q, stem.log_q + stem.gumbel[:, 0])
        parts = (
            (first.codes, ahead.codes),
            (first.confidence, ahead.confidence),
            (first.source, ahead.source),
        )
        return Candidates(*(torch.cat((own, all_[:, 1:]), dim=1) for own, all_ in parts))


def at_first_level(ahead: Candidates, log_q: Tensor, noisy: Tensor) -> Candidates:
    """The K best codes of the first position, [B, 1, K], by log s + DRAFTER_WEIGHT log q: s the stale law's
    confidence, of codes it does not name that of the last one it names. A code both name stands once.

    log_q [B, V]: the drafter's law after the root; noisy: the same under the position's noise, whose best are
    the drafter's candidates.
    """
    stale, said = ahead.codes[:, 0], ahead.confidence[:, 0]
    width = stale.shape[1]
    drafted = noisy.topk(width, dim=-1).indices
    known = said.isfinite()
    same = (drafted[:, None] == stale[..., None]) & known[..., None]  # [B, stale, drafted]
    unnamed = said.masked_fill(~known, 0.0).amin(dim=1, keepdim=True)
    code = torch.cat((stale, drafted), dim=1)
    belief = torch.cat((said, unnamed.masked_fill(same.any(dim=1), float("-inf"))), dim=1)
    score = belief + DRAFTER_WEIGHT * log_q.gather(1, code).clamp(min=LEAST_LOG_Q)
    value, best = score.log_softmax(dim=-1).topk(width, dim=-1)
    named = torch.where(same.any(dim=2), BOTH, ahead.source[:, 0])
    source = torch.cat((named, torch.full_like(drafted, DRAFTER)), dim=1)
    return Candidates(*(x[:, None] for x in (code.gather(1, best), value, source.gather(1, best))))
