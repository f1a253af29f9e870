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
from adt_tree.passes import Passes
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


@dataclass(frozen=True, slots=True)
class Scored:
    """What a target pass says of every node: logits [G, B, N, V] fp32 and features [G, B, N, D]."""

    logits: Tensor
    features: Tensor
    rows: Any = None  # what else the target needs to commit a path of this tree: tensors, see adt_tree.passes


class Target(Protocol):
    """The model whose law is sampled. Row b of every tensor is slot b; all slots share each forward pass."""

    grid: Grid
    num_codes: int
    slots: int
    device: torch.device
    passes: Passes  # who runs the work on this device

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """Forget the slot's image and commit the prompt."""

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """Score every node; committed: the image codes of each slot's prefix, 0 of idle ones (known to the
        host: they limit what attention reads)."""

    def commit(self, verdict: Verdict, scored: Scored) -> None:
        """Append the accepted path of the tree just scored, root first, to each slot's prefix, in place."""

    def release(self, slot: int) -> None:
        """Empty an idle slot: until the next prefill it takes part in passes as an image of its own,
        unread."""


class Drafter(Protocol):
    """The network of EAGLE: predicts features, and codes through the target's head."""

    device: torch.device
    passes: Passes
    deepest: int  # levels of the largest tree there is room for

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """Forget the slot's image and take in the prompt, but for its last feature, which pairs with the
        first code."""

    def release(self, slot: int) -> None:
        """As Target.release."""

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Commit pairs (feature at p [G, B, A, D], code at p + 1 [B, A]), `count` [B] of them valid; return
        logits [G, B, V] fp32 and feature [G, B, D] at the last valid pair. committed: as Target.forward."""

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int, reach: int
    ) -> tuple[Tensor, Tensor]:
        """Run W tree nodes a slot: codes [B, W], their parents' features [G, B, W, D], ancestors [B, W, E]
        over all nodes expanded since extend, these last; depth levels below the root's children. No slot
        has committed more than `reach` codes. Returns logits [G, B, W, V] fp32 and features [G, B, W, D]."""


class Proposer(Protocol):
    """Who drafts. The loop does not know which."""

    passes: Passes  # who runs what moves it on: observe(), and what goes before in a cycle

    def calls(self, shape: TreeShape) -> int:
        """Drafter passes that a tree of this shape takes, whatever its company in the batch."""

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """A new image takes the slot; code [] is its first."""

    def release(self, slot: int) -> None:
        """As Target.release."""

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """A tree per slot below roots [B]; committed: as Target.forward."""

    def observe(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """Take in what was accepted: log_p [B, N, V], the same under the noise of the nodes' positions, and
        the target's features [G, B, N, D] at every node. What it keeps it writes in place."""
