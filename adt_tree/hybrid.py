"""Hybrid drafting: the EAGLE drafter knows the newest code, stale codes reach far; one pool of both.

Dimensions: G guidance branches, B images, F frontier nodes, W the largest width, K stale candidates, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.calibrate import BOTH, DRAFTER, Calibration
from adt_tree.policy import TreeShape
from adt_tree.propose import EagleProposer, Stem
from adt_tree.roles import Drafter, Prefix
from adt_tree.sampling import Sampling, log_probs
from adt_tree.stale import KEPT, Anchors, Candidates, StaleCodes, chains
from adt_tree.tree import DraftTree, Pool, lone_roots, select
from adt_tree.verify import Verdict

DRAFTED_LEVELS = 2  # levels the network drafts; each costs one of its passes


class HybridProposer:
    """EAGLE's candidates and stale ones for the first levels, stale chains below them."""

    def __init__(
        self, drafter: Drafter, sampling: Sampling, stale: StaleCodes, calibration: Calibration, slots: int
    ) -> None:
        self.stale, self.calibration = stale, calibration
        growth = HybridGrowth(stale, calibration)
        self.eagle = EagleProposer(drafter, sampling, growth, slots)

    def calls(self, shape: TreeShape) -> int:
        """See Proposer."""
        return max(1, min(DRAFTED_LEVELS, shape.depth))

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        self.eagle.prefill(slot, prompt, prefix, code)
        self.stale.prefill(slot, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self.eagle.release(slot)
        self.stale.release(slot)

    def propose(self, shapes: Sequence[TreeShape], roots: Tensor, gumbel: Tensor, reach: int) -> DraftTree:
        """See Proposer."""
        return self.eagle.propose(shapes, roots, gumbel, reach)

    def observe(
        self, tree: DraftTree, log_p: Tensor, gumbel: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        self.calibration.observe(tree, verdict)
        self.stale.observe(tree, log_p, gumbel, verdict)
        self.eagle.observe(tree, log_p, gumbel, features, verdict)


class HybridGrowth:
    """A trunk of DRAFTED_LEVELS levels grown by the network, stale codes among every node's candidates; under
    each of its last level's best nodes a stale chain. A node's score is the sum of log acceptance rates."""

    def __init__(self, stale: StaleCodes, calibration: Calibration) -> None:
        self.stale, self.calibration = stale, calibration

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth."""
        roots, bounds = stem.roots, stem.bounds
        if min(bounds) == 0:
            return lone_roots(roots)
        depth, width, budget = stem.limits.unbind(1)
        rank = torch.arange(bounds[2], device=roots.device)
        level = torch.arange(bounds[1], device=roots.device)
        absent = (level >= depth[:, None])[..., None] | (rank >= width[:, None])[:, None]  # [B, L, W]
        found = self.stale.candidates(bounds[1], bounds[2])
        trunk, anchors = self._trunk(drafter, sampling, stem, found, absent)
        trunk = _keep_path(trunk, anchors)
        if anchors.depth == bounds[1]:
            return select(trunk, budget, roots, bounds)
        codes, said, source = (x[:, anchors.depth :] for x in (found.codes, found.confidence, found.source))
        bins = self.calibration.bins(source, rank, said)
        none = absent[:, anchors.depth :] | ~said.isfinite()
        gain = self.calibration.log_rate(bins, said).masked_fill(none, float("-inf"))
        pool = Pool.join([trunk, chains(codes, gain, bins, anchors)])
        return select(pool, budget, roots, bounds)

    def _trunk(
        self,
        drafter: Drafter,
        sampling: Sampling,
        stem: Stem,
        found: Candidates,
        absent: Tensor,
    ) -> tuple[Pool, Anchors]:
        """The drafted levels, and their last frontier."""
        images, depth, wide = absent.shape
        anchors = Anchors.root(images, absent.device)
        log_q, features = stem.log_q[:, None], stem.feature[:, :, None]
        eye = torch.eye(wide, dtype=torch.bool, device=absent.device).expand(images, -1, -1)
        code, ancestors = found.codes[:, 0], eye[..., :0]
        pools = []
        for level in range(min(DRAFTED_LEVELS, depth)):
            if level:
                logits, features = drafter.expand(code, features, ancestors, level - 1, stem.reach)
                log_q = log_probs(logits, sampling)
            child, gain, bins = self._children(
                log_q + stem.gumbel[:, level, None], found, absent[:, level], level
            )
            total = gain + anchors.score[..., None]
            parents = anchors.index[..., None].expand_as(child)
            depths = torch.full(child.shape[1:], level + 1, device=child.device)
            pools.append(Pool.flat(child, total, parents, depths, bins))
            score, best = total.flatten(1).topk(wide, dim=1)
            score = score.masked_fill(absent[:, level], float("-inf"))
            parent = best // child.shape[2]
            code = child.flatten(1).gather(1, best)
            features = features.gather(
                2, parent[None, ..., None].expand(features.shape[0], -1, -1, features.shape[-1])
            )
            if level:
                ancestors = ancestors.gather(1, parent[..., None].expand_as(ancestors))
            ancestors = torch.cat((ancestors, eye), dim=2)
            anchors = Anchors(anchors.offset + best, score, level + 1, anchors.offset + child[0].numel())
        return Pool.join(pools), anchors

    def _children(
        self, law: Tensor, found: Candidates, absent: Tensor, level: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, log acceptance rates and bins [B, F, W + K] of every frontier node's candidates.

        law [B, F, V]: log q + G; absent [B, W]: ranks beyond an image's shape. A code both sources name
        stands once, as the drafter's.
        """
        wide = absent.shape[1]
        rank = torch.arange(wide, device=law.device)
        value, child = law.log_softmax(dim=-1).topk(wide, dim=-1)
        stale = found.codes[:, None, level].expand_as(child)
        said = found.confidence[:, None, level].expand_as(value)
        unnamed = absent[:, None] | ~value.isfinite()
        unseen = absent[:, None] | ~said.isfinite()
        same = (child[..., None] == stale[..., None, :]) & ~unnamed[..., None] & ~unseen[..., None, :]
        twice = same.any(dim=3)
        bins = torch.cat(
            (
                self.calibration.bins(torch.where(twice, BOTH, DRAFTER), rank, value),
                self.calibration.bins(found.source[:, None, level], rank, said),
            ),
            dim=2,
        )
        none = torch.cat((unnamed, unseen | same.any(dim=2)), dim=2)
        gain = self.calibration.log_rate(bins, torch.cat((value, said), dim=2))
        gain = gain.masked_fill(none, float("-inf"))
        return torch.cat((child, stale), dim=2), gain, bins


def _keep_path(trunk: Pool, anchors: Anchors) -> Pool:
    """The trunk with the first anchor's path scored KEPT less its depth: it carries the main chain."""
    scores, node = trunk.scores.clone(), anchors.index[:, :1]
    for depth in range(anchors.depth, 0, -1):
        score = scores.gather(1, node)
        scores.scatter_(1, node, torch.where(score.isfinite(), KEPT - depth, score))
        node = trunk.parents.gather(1, node)
    return replace(trunk, scores=scores)
