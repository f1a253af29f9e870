"""Confidence that means something: what a source says of a draft code -> how often such codes are accepted.

Dimensions: B images, N nodes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict, reached_nodes

DRAFTER, STALE, BOTH, SEED = range(4)  # who names a code: the network, a stale law, both, a neighbouring cell
SOURCES = 4
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92)  # between bins of raw confidence
MIDDLES = (0.01, 0.035, 0.075, 0.15, 0.27, 0.42, 0.57, 0.72, 0.86, 0.97)
PRIOR = 8.0  # visits that a bin's own confidence counts for before anything was seen


class Calibration:
    """Acceptance rate by source, rank and bin of raw confidence, learned from the nodes that were reached.

    A node is reached when its parent was accepted; only then is it known whether its code was the choice. A
    bin starts as if PRIOR visits had gone as its confidence says. The rates order drafts and nothing else:
    what is committed does not depend on them. State: two counts a bin, shared by all images.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        """ranks: candidates of one source told apart."""
        self.ranks = ranks
        self._edges = torch.tensor(EDGES, device=device).log()
        self._said = torch.tensor(MIDDLES, device=device).repeat(SOURCES * ranks)
        self.hits, self.visits = PRIOR * self._said, torch.full_like(self._said, PRIOR)
        self.unbinned = len(self._said)  # the bin of codes whose confidence is left as it is

    def bins(self, source: Tensor | int, rank: Tensor, confidence: Tensor) -> Tensor:
        """Bins, int64, of codes with that log-confidence; the three broadcast, rank counts from 0."""
        place = rank.clamp(max=self.ranks - 1) + self.ranks * source
        return place * len(MIDDLES) + torch.bucketize(confidence.contiguous(), self._edges)

    def log_rate(self, bins: Tensor, confidence: Tensor) -> Tensor:
        """Log of the acceptance rate of codes with those bins; at most 0. The log-confidence plus its bin's
        correction, so that the order within a bin stays."""
        correction = F.pad((self.hits / (self.visits * self._said)).log(), (0, 1))
        return (confidence + correction[bins]).clamp(max=0)

    def observe(self, tree: DraftTree, verdict: Verdict) -> None:
        """Count the reached nodes; a tree without bins (a lone root) has none."""
        if tree.bins is None:
            return
        reached, accepted = reached_nodes(tree, verdict)
        counted = (tree.bins < self.unbinned).flatten()
        bins = tree.bins.flatten().clamp(max=self.unbinned - 1)
        for counts, nodes in ((self.visits, reached), (self.hits, accepted)):
            counts.scatter_add_(0, bins, (nodes.flatten() & counted).to(counts.dtype))
