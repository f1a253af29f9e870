"""Who plays: the protocols by which the loop knows its target, drafter and proposer.

Dimensions: G guidance branches, B images in flight (slots), N nodes, A path slots, V codes, D features.
Codes are codebook ids everywhere; a target maps them to the token ids of its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict

# The noise [B, levels, V] of so many levels below the roots: row l is that of level l + 1.
Below = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Request:
    """One image to make. prompt is whatever the target's own text side produced; the loop passes it
    through."""

    name: str
    prompt: Any
    seed: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prefill leaves for the first code: logits [G, V] fp32, and the features [T_g, D] of every
    branch."""

    logits: Tensor
    features: Sequence[Tensor]


class Target(Protocol):
    """The model whose law is sampled. Row b of every tensor is slot b; all slots share each forward pass."""

    grid: Grid
    num_codes: int
    slots: int
    device: torch.device

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """Forget the slot's image and commit the prompt."""

    def forward(self, tree: DraftTree, reach: int) -> tuple[Tensor, Tensor]:
        """logits [G, B, N, V] fp32 and features [G, B, N, D] of every node; no slot has committed more than
        `reach` image codes (a host bound: it limits what attention reads)."""

    def commit(self, verdict: Verdict) -> None:
        """Append the accepted path, root first, to each slot's prefix, in place."""

    def release(self, slot: int) -> None:
        """Empty an idle slot: until the next prefill it takes part in passes as an image of its own,
        unread."""


class Drafter(Protocol):
    """The network of EAGLE: predicts features, and codes through the target's head."""

    device: torch.device

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """Forget the slot's image and take in the prompt, but for its last feature, which pairs with the
        first code."""

    def release(self, slot: int) -> None:
        """As Target.release."""

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Commit pairs (feature at p [G, B, A, D], code at p + 1 [B, A]), `count` [B] of them valid; return
        logits [G, B, V] fp32 and feature [G, B, D] at the last valid pair."""

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int, reach: int
    ) -> tuple[Tensor, Tensor]:
        """Run W tree nodes a slot: codes [B, W], their parents' features [G, B, W, D], ancestors [B, W, E]
        over all nodes expanded since extend, these last; depth levels below the root's children. Returns
        logits [G, B, W, V] fp32 and features [G, B, W, D]."""


class Proposer(Protocol):
    """Who drafts. The loop does not know which."""

    def calls(self, shape: TreeShape) -> int:
        """Drafter passes that a tree of this shape takes, whatever its company in the batch."""

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """A new image takes the slot; code [] is its first."""

    def release(self, slot: int) -> None:
        """As Target.release."""

    def propose(self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, reach: int) -> DraftTree:
        """A tree per slot below roots [B]."""

    def observe(
        self, tree: DraftTree, log_p: Tensor, noisy: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """Take in what was accepted: log_p [B, N, V], the same under the noise of the nodes' positions, and
        the target's features [G, B, N, D] at every node."""
