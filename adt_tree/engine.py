"""Puts a method on a model: makes its target, proposer, tree policy and verification rule."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.errors import UserError
from adt_tree.fastest_size import AutoTree, FastestSize
from adt_tree.method import Demand, Method
from adt_tree.noise import Noise
from adt_tree.policy import AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
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
    if method.tree is None or not method.drafting:
        return Engine(method, sampling, model.target(slots, sampling, 1, max_prompt, demand))
    tree = StaticTree(STATIC_TREES[method.tree]) if isinstance(method.tree, str) else method.tree
    on_cpu = model.codebook.device.type == "cpu"
    shapes = tree.shapes(model.grid, not on_cpu) if isinstance(tree, AutoTree) else [tree.largest]
    if shapes[-1].width > model.num_codes:
        raise UserError(
            f"a tree {shapes[-1].width} nodes wide: the codebook has {model.num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    target = largest_target(model, sampling, shapes, slots, max_prompt, demand)
    setup = Setup(model, method, sampling, target, tree, shapes[-1])
    proposer = import_module(f"adt_tree.proposers.{method.spec.proposer}").make(setup)
    policy: Policy = Fixed(shapes[-1])
    if isinstance(tree, AdaptiveTree):
        policy = AdjacencyAdaptive(tree, slots, model.grid)
    elif isinstance(tree, AutoTree):
        policy = FastestSize(shapes, model.grid.width, idle_slots_cost=not on_cpu or target.few_shapes)
    proposer_is_rule = not method.spec.verify and method.control is None
    rule: Rule = proposer if proposer_is_rule else make_rule(setup)
    return Engine(method, sampling, target, (proposer, policy, rule))


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
    a line on stderr for each. UserError if none would be left.
    """
    while True:
        try:
            return model.target(slots, sampling, shapes[-1].num_nodes, max_prompt, demand)
        except UserError as error:
            if len(shapes) == 1:
                raise
            print(f"total_token auto: no trees of {shapes.pop().num_nodes} nodes: {error}", file=sys.stderr)


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
