"""A method on a model: the target, and who drafts, with which shapes and which rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.policy import AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.proposers.eagle import EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.proposers.rivals import JacobiWindow, couple, product_tree, redraw
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.roles import Drafter, Proposer, Request, Target
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import StaticTree
from adt_tree.verify import Control, Coupled, GreedyRelaxed, Rejection, Rule


class Model(Protocol):
    """What an engine takes from a loaded model."""

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
        """A target with room for so many images, nodes of a tree and prompt tokens."""

    def drafter(self, target: Any, max_depth: int, max_width: int) -> Drafter:
        """The drafter beside that target."""

    def nearest(self, k: int, table: Path | None) -> Tensor:
        """Nearest-latent table [V, k] int64."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything one method needs on one model; drafting is None in the AR baseline."""

    method: Method
    sampling: Sampling
    target: Target
    drafting: tuple[Proposer, Policy, Rule] | None = None

    def steps(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Every target call, as it happens."""
        if self.drafting is None:
            noise = Noise(self.target.num_codes, silent=self.sampling.greedy)
            return autoregressive(self.target, requests, self.sampling, noise)
        return speculative(self.target, *self.drafting, requests, self.sampling)

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Finished images, as they finish."""
        return finished(self.steps(requests))


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """The engine of a method with room for `slots` images in flight and prompts of max_prompt tokens.

    ValueError if the model's codebook is too small for the method's trees or neighbours.
    """
    sampling = replace(method.sampling, top_p_first=method.rules == "reference")
    if method.tree is None:
        return Engine(method, sampling, model.target(slots, sampling, 1, max_prompt))
    tree = StaticTree(STATIC_TREES[method.tree]) if isinstance(method.tree, str) else method.tree
    static = tree if isinstance(tree, StaticTree) else None
    shape = largest_shape(tree, model.num_codes)
    target = model.target(slots, sampling, shape.budget + 1, max_prompt)
    proposer = _proposer(model, method, target, sampling, shape, static)
    policy: Policy = Fixed(shape)
    if isinstance(tree, AdaptiveTree):
        policy = AdjacencyAdaptive(tree, slots)
    if isinstance(proposer, JacobiWindow) and not method.control:
        rule: Rule = proposer  # a window judges what it drafts
    else:
        rule = _rule(model, method, static)
    return Engine(method, sampling, target, (proposer, policy, rule))


def largest_shape(tree: TreeShape | AdaptiveTree | StaticTree, num_codes: int) -> TreeShape:
    """The greatest depth, width and budget of a method's trees. ValueError if the codebook is smaller."""
    shape = tree if isinstance(tree, TreeShape) else tree.largest
    if shape.width > num_codes:
        raise ValueError(
            f"a tree {shape.width} nodes wide: the codebook has {num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    return shape


def _proposer(
    model: Model,
    method: Method,
    target: Target,
    sampling: Sampling,
    shape: TreeShape,
    static: StaticTree | None,
) -> Proposer:
    """Who drafts, with room for trees of `shape`."""
    slots, device = target.slots, target.device
    if method.drafter == "eagle":
        drafter = model.drafter(target, shape.depth, shape.width)
        keep_q = method.verify == "rejection" and not method.greedy
        growth = grow_dynamic if static is None else StaticGrowth(static, keep_q, device)
        return EagleProposer(drafter, sampling, growth, slots)
    if method.drafter == "window":
        tail = redraw if method.name == "sjd" else couple
        tree = StaticTree(product_tree(shape))
        return JacobiWindow(tree, tail, target, method.greedy, method.seeds)
    return SelfDraftProposer(model.grid, slots, shape.width, method.seeds, model.num_codes, device)


def _rule(model: Model, method: Method, static: StaticTree | None) -> Rule:
    """The verification rule; greedy decoding without relaxation is coupled with silent noise."""
    noise = Noise(model.num_codes, silent=method.greedy)
    if method.control is not None:
        return Control(noise, accept=method.control == "accept-all")
    relaxation = None
    if method.lantern is not None:
        k = method.lantern.neighbours(model.num_codes)
        table = Path(method.lantern.table) if method.lantern.table else None
        relaxation = Relaxation(model.nearest(k + 1, table), k, method.lantern.delta)
    if method.greedy and relaxation is not None:
        order = None if static is None else torch.tensor(static.row_order, device=model.codebook.device)
        return GreedyRelaxed(model.num_codes, relaxation, order)
    if method.greedy or method.verify == "coupled":
        return Coupled(noise, relaxation)
    return Rejection(model.num_codes, static is not None, relaxation, reference=method.rules == "reference")
