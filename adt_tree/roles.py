"""The roles: protocols by which the loop knows its target, its drafter and its proposer.

A model family is a Target, and a Drafter if it has a drafter network; a way of drafting is a Proposer. Codes
are codebook ids everywhere; a target maps them to the token ids of its model. All images in flight share each
forward pass: row b of every tensor is slot b. The argument `committed` holds the number of image cells in
each slot's prefix, 0 for an idle slot. The host knows these numbers without waiting for the device, so they
bound how many cache slots attention reads.

Dimensions: G guidance branches, B images in flight (slots), N nodes, A path nodes, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.noise import PositionNoise
from adt_tree.padding import Padding
from adt_tree.policy import TreeShape
from adt_tree.sampling import PassSampling
from adt_tree.settings import Sampling
from adt_tree.tree import BatchShapes, DraftTree
from adt_tree.verify import Verdict

Result = TypeVar("Result")


class Run(Protocol):
    """Calls a function of tensors: run(function, *inputs) returns function(*inputs).

    The target provides it. A target on a GPU may record the kernels of the first call (a CUDA graph) and
    replay them, without the function's Python, whenever the tensors have the same shapes and the other inputs
    are equal. Therefore the function

    - neither reads numbers back from the device nor copies any to it;
    - depends on its inputs, on constants, and on tensors that are only ever updated in place;
    - takes and returns tensors, alone or in dataclasses and tuples, and hashable values.

    A torch.nn.Buffer among the inputs is updated in place, too. The results are valid until the function is
    called again.
    """

    def __call__(self, function: Callable[..., Result], *inputs: Any) -> Result: ...


def run_directly(function: Callable[..., Result], *inputs: Any) -> Result:
    """A Run that only calls the function."""
    return function(*inputs)


class Client(Protocol):
    """The sender of a request, for runs that serve many: neither its departure nor a fault of its image may
    end the run."""

    @property
    def gone(self) -> bool:
        """True if the image is no longer wanted. It then leaves its slot before the next step."""

    def fail(self, error: FloatingPointError) -> None:
        """Called if the logits of the image are not numbers. The image then leaves its slot unfinished."""


@dataclass(frozen=True, slots=True)
class Request:
    """One image to generate. prompt is an encoded prompt of the target; the loop hands it on unread."""

    name: str
    prompt: Any
    seed: int
    sampling: Sampling | None = None  # None: the engine's
    client: Client | None = None  # None: the image is always finished, and a fault ends the run
    warnings: tuple[str, ...] = ()  # what the user must know about the image, such as that its prompt was cut


@dataclass(frozen=True, slots=True)
class Prefix:
    """The result of a prefill: the logits of the first code [G, V] fp32, and for every branch g the features
    [T_g, D] of the T_g rows of its prefix."""

    logits: Tensor
    features: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a target pass: logits [G, B, N, V] fp32 and features [G, B, N, D] of every node."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True)
class StepStart:
    """What is known of a step before its drafts. Row b of the tensors is for the tree of slot b."""

    shapes: BatchShapes  # of the trees to draft
    last_codes: Tensor  # [B] the roots
    positions: Tensor  # [B] of the first code that is not committed, below the root
    noise_below: Callable[[int], PositionNoise]  # (L) -> the noise of L positions; level l is for depth l + 1
    longest: int  # a bound on the cells in any slot's prefix
    sampling: PassSampling  # that of the target's distribution


class Batch(Protocol):
    """What a proposer knows of the trees that it drafts together."""

    grid: Grid
    num_codes: int
    slots: int  # number of trees
    device: torch.device
    run: Run  # calls the parts of a step that run on the device


class Target(Batch, Protocol):
    """The model whose distribution is sampled. One tree per image in flight."""

    compile: Callable[[Any], Any]  # returns a function of tensors compiled or, by default, as it is

    padding: Padding  # of its steps

    def prefill(self, prompts: Mapping[int, Any]) -> Mapping[int, Prefix]:
        """Commits prompts to their slots in place of the images that these held. Returns the prefix of every
        slot."""

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """Scores every node of the trees in one pass. committed: the cells in each slot's prefix, or the
        bounds on them that padding.committed() gives, which change in fewer steps."""

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        """Appends the accepted path of the tree that was scored last, root first, to each slot's prefix."""

    def release(self, slot: int) -> None:
        """Empties the prefix of an idle slot. Until its next prefill the slot's results are unused, so passes
        may leave it out."""


class Drafter(Protocol):
    """The drafter network of EAGLE. It predicts features, which the target's head turns into logits."""

    device: torch.device

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """Commits the prompt's features to a slot in place of the image it held, except for the last one,
        which extend() will pair with the first code."""

    def release(self, slot: int) -> None:
        """Empties the prefix of an idle slot."""

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Commits the pairs of the last step: a feature [G, B, A, D] and the code [B, A] one position later,
        of which the first `count` [B] are valid. Returns the logits [G, B, V] fp32 and the feature [G, B, D]
        at the last valid pair. longest: a bound on the cells in any slot's prefix."""

    def places(self, depths: Tensor, widths: Sequence[int]) -> Sequence[Any]:
        """Returns what expand() takes as `place`, for every level of the tree that follows the last extend().

        depths [E]: of the nodes that the tree can expand, level after level: 0 for children of the root, 1
        for grandchildren, and so on. widths: the number of nodes of each level.
        """

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        """Runs a level of W tree nodes per slot. Returns their logits [G, B, W, V] fp32 and features [G, B,
        W, D].

        codes [B, W]; features [G, B, W, D]: of their parents; ancestors [B, W, E] bool over the nodes of
        places(), the nodes themselves among them. Earlier levels must have run.
        """


class Proposer(Protocol):
    """A way of drafting. The loop treats all alike."""

    def calls(self, shape: TreeShape) -> int:
        """Returns the number of drafter passes that a tree of this shape would take in a batch of one."""

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Starts a new image in a slot. code []: its first code."""

    def release(self, slot: int) -> None:
        """Prepares an idle slot for the steps until its next prefill, in which its tree is unused."""

    def propose(self, start: StepStart) -> DraftTree:
        """Returns one tree per slot."""

    def observe(
        self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict, positions: Tensor
    ) -> None:
        """Learns from a step. positions [B]: as in StepStart.

        perturbed [B, N, V]: log p plus noise for the position after each node. features [G, B, N, D]: the
        target's features of the nodes. Both cover all nodes, accepted or not.
        """


class Model(Protocol):
    """A loaded model, with the members that an engine uses."""

    @property
    def grid(self) -> Grid:
        """The rasters of an image's codes."""

    @property
    def codebook(self) -> Tensor:
        """The code vectors [V, C]."""

    @property
    def embeddings(self) -> Tensor:
        """The input embeddings of the codes [V, D]."""

    @property
    def num_codes(self) -> int:
        """The size V of the codebook."""

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> Target:
        """Returns a target with room for `slots` images, trees of max_nodes nodes (the root included), and
        prompts of max_prompt tokens. Raises NoRoom if the model has too few positions for it, or the device
        too little memory for it and a drafter."""

    def drafter(self, target: Any, max_depth: int, max_width: int) -> Drafter:
        """Returns the drafter network for that target, with room for trees of that depth and width."""

    def nearest(self, k: int, table: Path | None) -> Tensor:
        """Returns the k nearest other codes of every code, [V, k] int64. table: a file or folder to read them
        from."""
