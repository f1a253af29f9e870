"""What a proposer says of its draft codes, and what becomes of them: roles that keep a record.

Ordinary decoding runs nothing of this. Dimensions: G guidance branches, B images, N nodes, W nodes a drafted
level, K stale candidates, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.calibrate import DRAFTER, EDGES, SOURCES
from adt_tree.hybrid import HybridGrowth, HybridProposer
from adt_tree.jacobi import JacobiProposer
from adt_tree.passes import DIRECT
from adt_tree.policy import TreeShape
from adt_tree.propose import Stem
from adt_tree.roles import Below, Drafter, Prefix, Proposer
from adt_tree.sampling import Sampling, log_probs
from adt_tree.stale import Candidates
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict, reached_nodes
from eval import arms

BINS = len(EDGES) + 1


@dataclass(frozen=True, slots=True)
class Said:
    """What a proposer says of every node; of the root and of padding: anything."""

    source: Tensor  # [B, N] int64: DRAFTER, STALE, BOTH or SEED
    rank: Tensor  # [B, N] int64: place among its source's candidates, from 0
    log_rate: Tensor  # [B, N]: log of the predicted rate of acceptance, the parent accepted


class Record:
    """Counts by source, rank, depth and bin of the predicted rate, over images and cycles.

    Only nodes that were reached count: their parent was accepted, so that their own fate is known.
    """

    def __init__(self, ranks: int, depths: int, device: torch.device) -> None:
        """ranks, depths: how many of each there are; a reached node beyond them is an error."""
        # Last dimension: nodes reached, nodes accepted, sum of predicted rates.
        self.counts = torch.zeros(SOURCES, ranks, depths, BINS, 3, dtype=torch.float64, device=device)
        self._edges = torch.tensor(EDGES, device=device)

    def add(self, tree: DraftTree, verdict: Verdict, said: Said) -> None:
        """Count a cycle's trees."""
        reached, accepted = reached_nodes(tree, verdict)
        rate = said.log_rate.exp()
        place = (said.source, said.rank, tree.depths - 1, torch.bucketize(rate, self._edges))
        seen = torch.stack((torch.ones_like(rate), accepted.to(rate.dtype), rate), dim=2)
        self.counts.index_put_(tuple(x[reached] for x in place), seen[reached].double(), accumulate=True)


class HeardDrafter:
    """A drafter whose laws since the last extend() are kept."""

    def __init__(self, inner: Drafter, sampling: Sampling) -> None:
        self._inner, self._sampling = inner, sampling
        self.device, self.deepest = inner.device, inner.deepest
        self._laws: list[Tensor] = []  # [B, W, V] log q after the root, then after each level's nodes
        self._levels: list[tuple[Tensor, Tensor]] = []  # codes [B, W] and slot of the parent [B, W]

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """See Drafter."""
        self._inner.prefill(slot, prompt, prefix)

    def release(self, slot: int) -> None:
        """See Drafter."""
        self._inner.release(slot)

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """See Drafter."""
        logits, feature = self._inner.extend(features, codes, count, committed)
        self._laws, self._levels = [log_probs(logits, self._sampling)[:, None]], []
        return logits, feature

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int, reach: int
    ) -> tuple[Tensor, Tensor]:
        """See Drafter."""
        logits, features = self._inner.expand(codes, features, ancestors, depth, reach)
        parent = torch.zeros_like(codes)
        if self._levels:  # ancestors end with the level before, then this one
            own, before = codes.shape[1], self._levels[-1][0].shape[1]
            parent = ancestors[..., -own - before : -own].int().argmax(dim=2)
        self._levels.append((codes, parent))
        self._laws.append(log_probs(logits, self._sampling))
        return logits, features

    def said(self, tree: DraftTree, gumbel: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and log softmax(log q + G) [B, N] of every node's code at its parent, where the network
        drafted its level; a tree grown since the last extend(), by that noise [B, >= depth, V]."""
        slot, rank = torch.zeros_like(tree.codes), torch.zeros_like(tree.codes)
        confidence = torch.zeros(tree.codes.shape, device=tree.codes.device)
        for level, law in enumerate(self._laws[: tree.depth]):
            above = slot.gather(1, tree.parents)
            here = (law + gumbel[:, level, None]).log_softmax(dim=-1)
            here = here.gather(1, above.clamp(max=law.shape[1] - 1)[..., None].expand(-1, -1, law.shape[2]))
            value = here.gather(2, tree.codes[..., None])
            now = tree.depths == level + 1
            rank = torch.where(now, (here > value).sum(dim=2), rank)
            confidence = torch.where(now, value[..., 0], confidence)
            if level < len(self._levels):
                codes, parent = self._levels[level]
                same = (codes[:, None] == tree.codes[..., None]) & (parent[:, None] == above[..., None])
                slot = torch.where(now, same.int().argmax(dim=2), slot)
        return rank, confidence


class HeardGrowth:
    """The hybrid's growth, whose candidates for the last trees are kept."""

    def __init__(self, proposer: HybridProposer) -> None:
        self._inner = HybridGrowth(proposer.stale, proposer.calibration, proposer.belief)
        self.found: Candidates | None = None

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth."""
        weight = self._inner.belief.weight
        self.found = self._inner.candidates(stem, weight)[0] if min(stem.bounds) else None
        return self._inner(drafter, sampling, stem)


def said_of(found: Candidates, tree: DraftTree) -> Said:
    """What the candidates that a tree of chains grew from say of its nodes."""
    level = (tree.depths - 1).clamp(min=0)[..., None].expand(-1, -1, found.codes.shape[2])
    confidence = found.confidence.gather(1, level)
    named = (found.codes.gather(1, level) == tree.codes[..., None]) & confidence.isfinite()
    rank = named.int().argmax(dim=2)
    source, log_rate = (
        x.gather(2, rank[..., None])[..., 0] for x in (found.source.gather(1, level), confidence)
    )
    return Said(source, rank, log_rate)


class HeardProposer:
    """A proposer that records what it said of the trees that were judged; what it drafts is unchanged."""

    passes = DIRECT  # what records a cycle has to run in it

    def __init__(self, inner: Proposer, says: Callable[[DraftTree, Tensor], Said], record: Record) -> None:
        """says: of a tree just grown and its noise."""
        self._inner, self._says, self.record = inner, says, record
        self._below: Below | None = None  # of the tree grown last

    def calls(self, shape: TreeShape) -> int:
        """See Proposer."""
        return self._inner.calls(shape)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        self._inner.prefill(slot, prompt, prefix, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self._inner.release(slot)

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        self._below = below
        return self._inner.propose(shapes, roots, below, committed)

    def observe(
        self, tree: DraftTree, log_p: Tensor, noisy: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer; the record comes first, before the proposer learns from the verdict."""
        if tree.depth:
            assert self._below is not None, "a tree of some depth was proposed"
            self.record.add(tree, verdict, self._says(tree, self._below(tree.depth)))
        self._inner.observe(tree, log_p, noisy, features, verdict)


def hear(proposer: Proposer, record: Record) -> HeardProposer:
    """The proposer under a record. Its drafter, if it has one, is replaced for good by one that is heard."""
    if isinstance(proposer, JacobiProposer):
        stale = proposer.stale  # asked before it has seen the verdict
        return HeardProposer(
            proposer, lambda tree, gumbel: said_of(stale.candidates(tree.depth, tree.width), tree), record
        )
    if isinstance(proposer, HybridProposer):
        growth = proposer.eagle.growth = HeardGrowth(proposer)

        def calibrated(tree: DraftTree, gumbel: Tensor) -> Said:
            assert growth.found is not None, "the tree was grown from candidates"
            said = said_of(growth.found, tree)
            return replace(said, log_rate=proposer.calibration.log_rate(tree.bins, said.log_rate))

        return HeardProposer(proposer, calibrated, record)
    eagle = arms.network(proposer)
    if eagle is None:
        raise TypeError(f"{type(proposer).__name__}: nobody knows what it says of its drafts")
    heard = eagle.drafter = HeardDrafter(eagle.drafter, eagle.sampling)
    return HeardProposer(
        proposer,
        lambda tree, gumbel: Said(torch.full_like(tree.codes, DRAFTER), *heard.said(tree, gumbel)),
        record,
    )
