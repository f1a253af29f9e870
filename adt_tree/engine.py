"""Puts a method on a model: makes its target, proposer, tree policy and verification rule."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from adt_tree.batch import StepOutput
from adt_tree.budget.candidates import AutoTree
from adt_tree.budget.policy import CostAware
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.errors import UserError
from adt_tree.method import Demand, Method
from adt_tree.noise import Noise
from adt_tree.policy import PLAIN, AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.roles import Model, Proposer, Request, Setup, Target
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import StaticTree
from adt_tree.verify import Control, Coupled, GreedyRelaxed, Rejection, Rule


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that one method needs on one model."""

    method: Method
    sampling: Sampling
    target: Target
    drafting: tuple[Proposer, Policy, Rule] | None = None  # None: the AR baseline

    def steps(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Yields the outcome of every target call as it happens."""
        if self.drafting is None:
            noise = Noise(self.target.num_codes, silent=self.sampling.greedy)
            return autoregressive(self.target, requests, self.sampling, noise)
        return speculative(self.target, *self.drafting, requests, self.sampling)

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yields images as they finish."""
        return finished(self.steps(requests))


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """Returns an engine with room for `slots` images in flight and prompts of max_prompt tokens.

    The method's row of adt_tree.method.METHODS names the module that drafts; its function `make` gives the
    proposer. UserError if the model's codebook is too small for the method's trees or neighbours.
    """
    sampling = replace(method.sampling, top_p_first=method.rules == "reference")
    demand = method.demand(model.num_codes)
    if method.tree is None:
        return Engine(method, sampling, model.target(slots, sampling, 1, max_prompt, demand))
    tree = StaticTree(STATIC_TREES[method.tree]) if isinstance(method.tree, str) else method.tree
    shapes = candidate_shapes(tree, model)
    target = largest_target(model, sampling, shapes, slots, max_prompt, demand)
    setup = Setup(model, method, sampling, target, tree, bounds(shapes))
    proposer = import_module(f"adt_tree.proposers.{method.spec.proposer}").make(setup)
    base = tree.base if isinstance(tree, AutoTree) else tree
    adaptive = AdjacencyAdaptive(base, slots, model.grid) if isinstance(base, AdaptiveTree) else None
    policy: Policy = adaptive or Fixed(shapes[-1])
    if isinstance(tree, AutoTree):
        idle_slots_cost = target.few_shapes or target.device.type != "cpu"
        policy = CostAware(shapes, model.grid.size, adaptive, tree.base is None, idle_slots_cost)
    proposer_is_rule = not method.spec.verify and method.control is None
    rule: Rule = proposer if proposer_is_rule else make_rule(setup)
    return Engine(method, sampling, target, (proposer, policy, rule))


def candidate_shapes(tree: TreeShape | AdaptiveTree | AutoTree | StaticTree, model: Model) -> list[TreeShape]:
    """Returns the shapes that AutoTree chooses from, smallest first, or the largest shape of other trees.

    UserError if a node would have more children than the codebook has codes.
    """
    shape = tree.largest
    if shape is not None and shape.width > model.num_codes:
        raise UserError(
            f"a tree {shape.width} nodes wide: the codebook has {model.num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    if isinstance(tree, AutoTree):
        shapes = tree.candidates(model.grid.width, buckets=model.codebook.device.type == "cuda")
        # The end of the image would cut all steps of a deeper self-drafted tree but the first, which is not
        # timed. A tree of one node always remains.
        deepest = max(1, model.grid.size - 3) if tree.base is None else math.inf
        shapes = [shape for shape in shapes if shape.width <= model.num_codes and shape.depth <= deepest]
        return shapes if len(shapes) > 1 else [PLAIN, TreeShape(1, 1, 1)]
    assert shape is not None
    return [shape]


def largest_target(
    model: Model,
    sampling: Sampling,
    shapes: list[TreeShape],
    slots: int,
    max_prompt: int,
    demand: Demand,
) -> Target:
    """Returns a target with room for all of `shapes`, smallest first.

    Shapes that are too large for the model's positions or the device's memory are removed from the list, with
    a line on stderr for each. UserError if no tree would be left.
    """
    while True:
        try:
            return model.target(slots, sampling, shapes[-1].num_nodes, max_prompt, demand)
        except UserError as error:
            if len(shapes) <= 2:  # one tree is left, because the first of two shapes is plain decoding
                raise
            print(f"total_token auto: no trees of {shapes.pop().num_nodes} nodes: {error}", file=sys.stderr)


def bounds(shapes: Iterable[TreeShape]) -> TreeShape:
    """Returns the greatest depth, width and budget among shapes."""
    sizes = zip(*((shape.depth, shape.width, shape.budget) for shape in shapes), strict=True)
    return TreeShape(*map(max, sizes))


def make_rule(setup: Setup) -> Rule:
    """Returns the verification rule. Greedy decoding without LANTERN is the coupled rule without noise."""
    model, method = setup.model, setup.method
    static = setup.tree if isinstance(setup.tree, StaticTree) else None
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
