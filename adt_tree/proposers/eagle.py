"""The proposer with an EAGLE drafter network, which grows dynamic (EAGLE-2) or static (EAGLE-1) trees.

The network predicts the target's next feature from the features so far; the target's head turns it into
logits. After every step it reads the features that the target computed along the accepted path, and drafts
from the last of them.

Dimensions: G guidance branches, B images, A path nodes, W nodes of a level, E nodes expanded so far, L
levels, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adt_tree.noise import PositionNoise
from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, MethodOnModel, NoiseBelow, Prefix, Run, run_directly
from adt_tree.sampling import PassSampling, filtered, force, log_probs
from adt_tree.static_trees import StaticTree
from adt_tree.tree import BatchShapes, DraftTree, Pool, Topology, select
from adt_tree.verify import Rule, Verdict


@dataclass(frozen=True, slots=True)
class DraftState:
    """The drafter's state at the roots, and the shapes of the trees to grow from it."""

    log_q: Tensor  # [B, V] the drafter's log-distribution after the root
    feature: Tensor  # [G, B, D] the drafter's feature of the root
    last_codes: Tensor  # [B] the roots
    shapes: BatchShapes
    noise: PositionNoise  # of the position of each level; there are shapes.levels


# Grows a tree per image from the drafter's state at the roots.
Growth = Callable[[Drafter, PassSampling, DraftState], DraftTree]


class EagleProposer:
    """Feeds the accepted path to the drafter, then grows a tree."""

    def __init__(self, drafter: Drafter, growth: Growth, slots: int, run: Run = run_directly) -> None:
        self.drafter, self.growth, self._run = drafter, growth, run
        # Target features that the drafter has not read yet, [G, B, A, D], and the code after each, [B, A].
        # The first `_count` [B] of a slot are valid. The size D is unknown until the first prefill.
        self._features: Tensor | None = None
        self._codes = torch.zeros(slots, 1, dtype=torch.int64, device=drafter.device)
        self._count = torch.ones(slots, dtype=torch.int64, device=drafter.device)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        # The drafter reads the prompt except for its last feature, which is paired with the first code here.
        self.drafter.prefill(slot, prompt, prefix)
        last = torch.stack([branch[-1] for branch in prefix.features])
        if self._features is None:
            self._features = last[:, None, None].repeat(1, *self._codes.shape, 1)
        self._features[:, slot, 0] = last
        self._codes[slot, 0] = code
        self._count[slot : slot + 1] = 1

    def calls(self, shape: TreeShape) -> int:
        return max(shape.depth, 1)  # extend() drafts the first level, and each expand() one more

    def release(self, slot: int) -> None:
        self.drafter.release(slot)
        self._count[slot : slot + 1] = 1  # every slot extends by at least one pair
        if self._features is not None:  # NaN in a pair that is not valid would reach the valid ones
            self._features[:, slot] = 0

    def propose(
        self,
        shapes: BatchShapes,
        last_codes: Tensor,
        noise_below: NoiseBelow,
        committed: Sequence[int],
        sampling: PassSampling,
    ) -> DraftTree:
        assert self._features is not None, "propose() needs a prefilled image"
        pairs = (self._features, self._codes, self._count)
        context, noise = self.drafter.context(committed), noise_below(shapes.levels)
        return self._run(self._grow, pairs, last_codes, shapes, noise, context, sampling)

    def _grow(
        self,
        pairs: tuple[Tensor, Tensor, Tensor],
        last_codes: Tensor,
        shapes: BatchShapes,
        noise: PositionNoise,
        context: Hashable,
        sampling: PassSampling,
    ) -> DraftTree:
        logits, feature = self.drafter.extend(*pairs, context)
        log_q = log_probs(logits[:, :, None], sampling, noise.level(0).forced)[:, 0]
        state = DraftState(log_q, feature, last_codes, shapes, noise)
        return self.growth(self.drafter, sampling, state)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        self._features, self._codes, self._count = self._run(pairs_on_path, features, verdict)


def pairs_on_path(features: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the features [G, B, A, D] of the nodes on the path, the codes [B, A] that follow them, and the
    number of valid ones [B]. All are copies, because the next prefill writes into them."""
    index = verdict.path[None, ..., None].expand(features.shape[0], -1, -1, features.shape[-1])
    return features.gather(2, index), verdict.codes.clone(), verdict.count.clone()


def make(setup: MethodOnModel) -> tuple[EagleProposer, Rule]:
    """Returns the proposer of eagle-1 (a static tree), eagle-2 and adt-tree (dynamic trees), and its rule."""
    method = setup.method
    topology = Topology(method.tree.paths) if isinstance(method.tree, StaticTree) else None
    keep_q = method.verify == "rejection" and not method.greedy
    return proposer(setup, topology, keep_q), setup.rule(topology)


def proposer(setup: MethodOnModel, topology: Topology | None, keep_q: bool) -> EagleProposer:
    """Returns the proposer of static trees of this topology, or of dynamic trees (None). keep_q: see
    StaticGrowth."""
    target = setup.target
    drafter = setup.model.drafter(target, setup.shape.depth, setup.shape.width)
    growth: Growth = grow_dynamic if topology is None else StaticGrowth(topology, keep_q, target.device)
    return EagleProposer(drafter, growth, target.slots, target.run)


def grow_dynamic(drafter: Drafter, sampling: PassSampling, state: DraftState) -> DraftTree:
    """Returns trees grown as in EAGLE-2: on every level the best `width` nodes expand to their `width` best
    children, and of all these nodes the best `budget` form the tree.

    The children of a node are the codes of greatest log q + G, with the noise G of their position (0 at
    temperature 0). The confidence of a child is its log softmax(log q + G), and the score of a node is the
    sum of the confidences along its path. All images grow to the largest shape; the nodes outside the shape
    of an image have the score -inf.

    The frontier is the W nodes per image that expand next: their codes and scores [B, W], their indices in
    the pool (`node`), features, and ancestors [B, W, E] over all nodes expanded so far.
    """
    depth, width, _ = state.shapes.limits.unbind(1)
    images, max_width = len(state.last_codes), state.shapes.width
    rank = torch.arange(max_width, device=state.last_codes.device)
    beyond = rank >= width[:, None]  # [B, W] ranks outside the width of an image
    eye = torch.eye(max_width, dtype=torch.bool, device=rank.device).expand(images, -1, -1)

    score, code = best_children(state.log_q + state.noise.gumbel[:, 0], max_width)
    score = score.masked_fill(beyond | (depth < 1)[:, None], float("-inf"))
    pools = [Pool(code, score, torch.full_like(code, -1), code.new_ones(max_width))]
    node = rank.expand(images, -1)
    features = state.feature[:, :, None].expand(-1, -1, max_width, -1)
    ancestors = eye
    for level in range(2, state.shapes.levels + 1):
        logits, features = drafter.expand(code, features, ancestors, level - 2)
        noise = state.noise.level(level - 1)
        # Neither log q nor the confidence of other codes is needed, so nothing is normalised here.
        unnormalised = force(filtered(logits, sampling), noise.forced)
        value, child = best_children(unnormalised + noise.gumbel, max_width)  # [B, W, W]
        total = value + score[..., None]
        total = total.masked_fill((beyond | (depth < level)[:, None])[:, None], float("-inf")).flatten(1)
        child = child.flatten(1)
        depths = child.new_full((child.shape[1],), level)
        pools.append(Pool(child, total, node.repeat_interleave(max_width, dim=1), depths))
        score, best = total.topk(max_width, dim=1)
        score = score.masked_fill(beyond, float("-inf"))
        code, parent = child.gather(1, best), best // max_width
        # The pool holds W nodes of level 1, then W * W nodes of each further level.
        node = max_width + (level - 2) * max_width**2 + best
        features = features.gather(2, parent[None, ..., None].expand_as(features))
        ancestors = torch.cat((ancestors.gather(1, parent[..., None].expand_as(ancestors)), eye), dim=2)
    return select(Pool.join(pools), state.shapes, state.last_codes)


def best_children(perturbed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the log-confidences log softmax(perturbed) of the `width` best codes, and these codes, both
    [..., width]. perturbed [..., V]: log q + G, up to a constant."""
    value, code = perturbed.topk(width, dim=-1)
    return value - perturbed.logsumexp(dim=-1, keepdim=True), code


class StaticGrowth:
    """Grows the trees of EAGLE-1, whose topology is fixed.

    Child r of a node is the code with the r-th greatest log q + G. With Gumbel noise G these are samples from
    q without replacement (Gumbel-top-k, Kool et al. 1903.06059); with G = 0 they are the best codes by q.
    """

    def __init__(self, tree: Topology, keep_q: bool, device: torch.device) -> None:
        """keep_q: store in DraftTree.q the distributions that children were sampled from, which recursive
        rejection needs."""
        self.tree, self.keep_q = tree, keep_q
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        self._ancestors = tree.ancestors().to(device)
        self._levels = [self._level(depth) for depth in range(tree.depth)]

    def _level(self, depth: int) -> _Level:
        """Returns the nodes that expand at a depth, with their children, which are all nodes of depth + 1."""
        nodes, above = self.tree.levels[depth], self.tree.levels[depth - 1] if depth else [0]
        below = [node for node, level in enumerate(self.tree.depths) if level == depth + 1]
        index = partial(torch.tensor, device=self._parents.device)
        return _Level(
            nodes=index(nodes),
            parents=index([above.index(self.tree.parents[n]) for n in nodes]),
            children=slice(below[0], below[-1] + 1),
            child_parents=index([nodes.index(self.tree.parents[n]) for n in below]),
            ranks=index([self.tree.ranks[n] for n in below]),
        )

    def __call__(self, drafter: Drafter, sampling: PassSampling, state: DraftState) -> DraftTree:
        """Returns the trees, without the levels below the deepest shape of the batch."""
        max_depth, last_codes = state.shapes.depth, state.last_codes
        images, nodes = len(last_codes), sum(depth <= max_depth for depth in self.tree.depths)
        log_q, features = state.log_q[:, None], state.feature[:, :, None]
        codes = last_codes[:, None].repeat(1, nodes)
        valid = self._depths[:nodes] <= state.shapes.limits[:, :1]
        confidence = log_q.new_zeros(images, nodes)
        q = log_q.new_zeros(images, nodes, log_q.shape[-1]) if self.keep_q else None
        expanded = last_codes.new_empty(0)
        for depth, level in enumerate(self._levels[: state.shapes.levels]):
            noise = state.noise.level(depth)
            if depth:
                expanded = torch.cat((expanded, level.nodes))
                mask = self._ancestors[level.nodes][:, expanded].expand(images, -1, -1)
                features = features[:, :, level.parents]
                logits, features = drafter.expand(codes[:, level.nodes], features, mask, depth - 1)
                log_q = log_probs(logits, sampling, noise.forced)
            value, code = best_children(log_q + noise.gumbel, self.tree.width)
            value = value[:, level.child_parents, level.ranks]
            codes[:, level.children] = code[:, level.child_parents, level.ranks]
            parents = self._parents[level.children]
            valid[:, level.children] &= value.isfinite() & valid[:, parents]
            confidence[:, level.children] = value + confidence[:, parents]
            if q is not None:
                q[:, level.nodes] = log_q.exp()
        parents, depths = (x[:nodes].expand(images, -1) for x in (self._parents, self._depths))
        ancestors = self._ancestors[:nodes, :nodes].expand(images, -1, -1)
        return DraftTree(codes, parents, depths, ancestors, valid, max_depth, self.tree.width, q, confidence)


@dataclass(frozen=True, slots=True)
class _Level:
    """One drafting level of a static tree: the nodes that expand, and their children."""

    nodes: Tensor  # numbers of the nodes that expand
    parents: Tensor  # index of each node's parent among the nodes that expanded one level up
    children: slice  # numbers of the children
    child_parents: Tensor  # index of each child's parent among `nodes`
    ranks: Tensor  # rank of each child among its parent's children
