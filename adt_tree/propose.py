"""Who drafts: the EAGLE drafter, growing dynamic (EAGLE-2) or static (EAGLE-1) trees.

Dimensions: G guidance branches, B images, W nodes a level, E nodes expanded so far, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, Prefix
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import DraftTree, StaticTree, select
from adt_tree.verify import Verdict


class Growth(Protocol):
    """How a tree grows from the drafter's law at the root."""

    def __call__(self, drafter: Drafter, sampling: Sampling, start: tuple[Tensor, Tensor], roots: Tensor,
                 shapes: Sequence[TreeShape], gumbel: Tensor, reach: int) -> DraftTree:
        """start: log q [B, V] and feature [G, B, D] at the root; otherwise as Proposer.propose."""


class EagleProposer:
    """The EAGLE drafter as proposer: feeds it the committed path, then grows a tree."""

    def __init__(self, drafter: Drafter, sampling: Sampling, growth: Growth, slots: int) -> None:
        self.drafter, self.sampling, self.growth = drafter, sampling, growth
        self._slots = slots
        self._features = torch.empty(0)  # [G, B, A, D] target features not yet shown to the drafter
        self._codes = torch.empty(0)  # [B, A] the code after each
        self._count = torch.ones(slots, dtype=torch.int64, device=drafter.device)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer: the prompt's last feature waits for its code."""
        self.drafter.prefill(slot, prompt, prefix)
        last = torch.stack([branch[-1] for branch in prefix.features])
        if self._codes.numel() == 0:
            self._features = last[:, None, None].expand(-1, self._slots, 1, -1).clone()
            self._codes = code.expand(self._slots, 1).clone()
        self._features[:, slot, 0] = last
        self._codes[slot, 0] = code
        self._count[slot] = 1

    def propose(self, shapes: Sequence[TreeShape], roots: Tensor, gumbel: Tensor, reach: int) -> DraftTree:
        """See Proposer."""
        logits, feature = self.drafter.extend(self._features, self._codes, self._count, reach)
        start = (log_probs(logits, self.sampling), feature)
        return self.growth(self.drafter, self.sampling, start, roots, shapes, gumbel, reach)

    def observe(self, tree: DraftTree, features: Tensor, verdict: Verdict) -> None:
        """See Proposer: pair the features along the path with the codes that follow."""
        index = verdict.path[None, ..., None].expand(features.shape[0], -1, -1, features.shape[-1])
        self._features = features.gather(2, index)
        self._codes, self._count = verdict.codes, verdict.count


def grow_dynamic(drafter: Drafter, sampling: Sampling, start: tuple[Tensor, Tensor], roots: Tensor,
                 shapes: Sequence[TreeShape], gumbel: Tensor, reach: int) -> DraftTree:
    """EAGLE-2: level by level, the best `width` nodes expand to their `width` best children; the best `budget` stay.

    Children of a node are the top of log q + G (G = 0: the top of q), its confidence is log softmax(log q + G), a
    node's score the sum along its path. Images of smaller shapes take part with -inf scores where theirs ends.
    """
    most_depth, most_width = max(s.depth for s in shapes), max(s.width for s in shapes)
    limits = torch.tensor([(s.depth, s.width, s.budget) for s in shapes], device=roots.device)
    depth, width, budget = limits.unbind(1)
    log_q, feature = start
    pool = _Pool(most_width, width)
    codes, scores = pool.add(_confidence(log_q, gumbel[:, 0])[:, None] if most_depth else log_q[:, None, :],
                             roots.new_zeros((len(shapes), 1), dtype=torch.float32), depth >= 1)
    features = feature[:, :, None].expand(-1, -1, most_width, -1)
    ancestors = torch.eye(most_width, dtype=torch.bool, device=roots.device).expand(len(shapes), -1, -1)
    for level in range(2, most_depth + 1):
        logits, features = drafter.expand(codes, features, ancestors, level - 2, reach)
        confidence = _confidence(log_probs(logits, sampling), gumbel[:, level - 1, None])
        codes, scores = pool.add(confidence, scores, depth >= level)
        raise NotImplementedError
    raise NotImplementedError
