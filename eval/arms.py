"""A method on a model: the target, proposer, policy and rule it is decoded with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from adt_tree.calibrate import Calibration
from adt_tree.candidates import CandidateCache
from adt_tree.decode import autoregressive, speculative
from adt_tree.eagle import EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.hybrid import HybridProposer
from adt_tree.noise import Noise
from adt_tree.policy import AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.roles import Proposer, Request, Target
from adt_tree.sampling import Sampling
from adt_tree.self_draft import SelfDraftProposer
from adt_tree.tree import STATIC_TREES, StaticTree
from adt_tree.verify import Coupled, GreedyRelaxed, Rejection, Rule
from eval.controls import Control
from eval.errors import UserError
from eval.method import Method
from models.model import Model


@dataclass(frozen=True, slots=True)
class Arm:
    """Everything one method needs to decode; proposer, policy and rule are None in plain decoding."""

    method: Method
    sampling: Sampling
    target: Target
    proposer: Proposer | None = None
    policy: Policy | None = None
    rule: Rule | None = None

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Finished images, as they finish."""
        if self.proposer is None:
            noise = Noise(self.target.num_codes, silent=self.sampling.greedy)
            return autoregressive(self.target, requests, self.sampling, noise)
        return speculative(self.target, self.proposer, self.policy, self.rule, requests, self.sampling)


def static_tree(name: str) -> StaticTree:
    """A published static tree by its list's name."""
    return StaticTree(STATIC_TREES[name])


def neighbours(method: Method, num_codes: int) -> int:
    """lantern_k for a codebook: as given, else chosen by its size. UserError if it has fewer neighbours."""
    k = method.lantern.k
    if k is None:
        return min(method.lantern.most, num_codes // 8)
    if k > num_codes - 2:
        raise UserError(f"--lantern_k {k}: the codebook has {num_codes} codes; give at most {num_codes - 2}")
    return k


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Arm:
    """The arm of a method with room for `slots` images in flight."""
    sampling = Sampling(
        method.temperature, method.top_k, method.top_p, method.cfg, top_p_first=method.rules == "reference"
    )
    if not method.drafting:
        return Arm(method, sampling, model.target(slots, sampling, 1, max_prompt))
    static = static_tree(method.static) if method.static else None
    shape = largest(method, static, model.num_codes)
    target = model.target(slots, sampling, shape.budget + 1, max_prompt)
    proposer = make_proposer(model, method, target, sampling, shape, static)
    policy = make_policy(method, shape, slots)
    return Arm(method, sampling, target, proposer, policy, make_rule(model, method, static))


def make_policy(method: Method, shape: TreeShape, slots: int) -> Policy:
    """Who chooses the shapes; `shape` everywhere where nothing adapts."""
    if method.adapt is None:
        return Fixed(shape)
    return AdjacencyAdaptive(method.adapt, slots)


def make_proposer(
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
        return EagleProposer(drafter, sampling, growth, slots, drafter.passes)
    stale = CandidateCache(model.grid, slots, shape.width, method.seed_cells, model.num_codes, device)
    if method.drafter == "jacobi":
        return SelfDraftProposer(stale, target.passes)
    drafter = model.drafter(target, shape.depth, shape.width)
    return HybridProposer(drafter, sampling, stale, Calibration(shape.width, device), slots, drafter.passes)


def network(proposer: Proposer | None) -> EagleProposer | None:
    """The part of a proposer that asks the drafter network; None if it has none."""
    inner = proposer.eagle if isinstance(proposer, HybridProposer) else proposer
    return inner if isinstance(inner, EagleProposer) else None


def largest(method: Method, static: StaticTree | None, num_codes: int) -> TreeShape:
    """The greatest depth, width and budget of the method's trees. UserError if the codebook is smaller."""
    if static is not None:
        shape = TreeShape(static.depth, static.width, len(static.parents) - 1)
    elif method.adapt is not None:
        shape = TreeShape(method.adapt.depth_max, method.adapt.width_max, method.adapt.budget)
    else:
        shape = method.shape
    if shape.width > num_codes:
        raise UserError(
            f"a tree {shape.width} nodes wide: the codebook has {num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    return shape


def make_rule(model: Model, method: Method, static: StaticTree | None) -> Rule:
    """The verification rule of a method; greedy decoding without relaxation is coupled with silent noise."""
    noise = Noise(model.num_codes, silent=method.greedy)
    if method.control is not None:
        return Control(noise, accept=method.control == "ceiling")
    relaxation = None
    if method.lantern is not None:
        k = neighbours(method, model.num_codes)
        table = Path(method.lantern.table) if method.lantern.table else None
        relaxation = Relaxation(model.nearest(k + 1, table), k, method.lantern.delta)
    if method.greedy and relaxation is not None:
        order = None if static is None else row_order(static).to(model.codebook.device)
        return GreedyRelaxed(model.num_codes, relaxation, order)
    if method.greedy or method.verify == "coupled":
        return Coupled(noise, relaxation)
    return Rejection(model.num_codes, static is not None, relaxation, reference=method.rules == "reference")


def row_order(tree: StaticTree) -> torch.Tensor:
    """[N] int64: each node's rank by its path, the order of the released code's candidate rows."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    rank_of = {path: rank for rank, path in enumerate(sorted(paths))}
    return torch.tensor([rank_of[path] for path in paths])
