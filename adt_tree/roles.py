"""Who plays: the protocols by which the loop knows its target, its drafter and its proposer.

A model family is a Target (and a Drafter); a way of drafting is a Proposer. Codes are codebook ids
everywhere; a target maps them to the token ids of its model. All images in flight share each forward pass:
row b of every tensor is slot b. What the protocols call `committed` is known to the host: the image codes in
each slot's prefix, 0 of idle slots. It bounds what attention reads without waiting for the device.

Dimensions: G guidance branches, B images in flight (slots), N nodes, A path nodes, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from adt_tree.budget import AutoTree
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling
from adt_tree.tree import BatchShapes, DraftTree, StaticTree
from adt_tree.verify import Verdict

# levels -> the noise [B, levels, V] of so many levels below the roots: row l is that of level l + 1
NoiseBelow = Callable[[int], Tensor]
Result = TypeVar("Result")


class Run(Protocol):
    """Calls a function of tensors: run(function, *inputs) returns function(*inputs).

    The target provides it. A target on a GPU may keep what the first call did on the device and repeat that,
    without the function's Python, whenever the inputs that are not tensors are equal and the tensors have the
    same shapes. So the function

    - reads no numbers back and copies none from the host;
    - depends on nothing but its inputs, constants, and tensors that it or others update in place;
    - takes and returns tensors, alone or in dataclasses and tuples, beside values that can be hashed.

    Its results hold until its next call.
    """

    def __call__(self, function: Callable[..., Result], *inputs: Any) -> Result: ...


def call(function: Callable[..., Result], *inputs: Any) -> Result:
    """The Run that just calls the function."""
    return function(*inputs)


@dataclass(frozen=True, slots=True)
class Request:
    """One image to make. prompt is what the target's own text side produced; the loop passes it through."""

    name: str
    prompt: Any
    seed: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prefill leaves for the first code: logits [G, V] fp32, and features [T_g, D] of every branch."""

    logits: Tensor
    features: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a target pass says of every node: logits [G, B, N, V] fp32 and features [G, B, N, D]."""

    logits: Tensor
    features: Tensor


class Target(Protocol):
    """The model whose distribution is sampled."""

    grid: Grid
    num_codes: int
    slots: int
    device: torch.device
    run: Run  # for everything that a step does on the device
    few_shapes: bool  # whether steps of a few shapes are faster than steps of the smallest shapes

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """Forget the slot's image and commit the prompt."""

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """Score every node of the trees in one pass."""

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        """Append the accepted path of the tree just scored, root first, to each slot's prefix, in place."""

    def release(self, slot: int) -> None:
        """Empty an idle slot: until the next prefill it takes part in passes, unread."""


class Drafter(Protocol):
    """The network of EAGLE: predicts features, and codes through the target's head."""

    device: torch.device

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """Forget the slot's image and take in the prompt, but for its last feature, which pairs with the
        first code."""

    def release(self, slot: int) -> None:
        """Empty an idle slot."""

    def context(self, committed: Sequence[int]) -> Hashable:
        """Returns what extend() needs to know of the prefixes on the host: equal contexts, equal passes."""

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """Commit pairs (feature at p [G, B, A, D], code at p + 1 [B, A]), `count` [B] of them valid; return
        logits [G, B, V] fp32 and feature [G, B, D] at the last valid pair. context: of the same step."""

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
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
        """Empty an idle slot."""

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """A tree per slot below last_codes [B]; the roots alone if shapes.empty."""

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Learn from what was accepted. perturbed [B, N, V]: log p under the noise of each node's position;
        features [G, B, N, D]: the target's at every node."""


class Model(Protocol):
    """A loaded model, as far as an engine uses it."""

    @property
    def grid(self) -> Grid:
        """Rows and columns of an image."""

    @property
    def codebook(self) -> Tensor:
        """Latents of the codes [V, C]."""

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> Target:
        """Returns a target with room for `slots` images, trees of max_nodes nodes with the root, and prompts
        of max_prompt tokens."""

    def drafter(self, target: Any, max_depth: int, max_width: int) -> Drafter:
        """Returns the drafter network beside that target."""

    def nearest(self, k: int, table: Path | None) -> Tensor:
        """Returns the table of nearest latents [V, k] int64."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the `make` of a module in adt_tree/proposers/ gets: one method on one model."""

    model: Model
    method: Method
    sampling: Sampling  # the method's, with the order of the filters that its rules have
    target: Target
    tree: TreeShape | AdaptiveTree | AutoTree | StaticTree
    shape: TreeShape  # the largest tree that the policy can ask for
