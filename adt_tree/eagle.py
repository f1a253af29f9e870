"""Who drafts: the EAGLE drafter, growing dynamic (EAGLE-2) or static (EAGLE-1) trees.

Dimensions: G guidance branches, B images, W nodes a level, E nodes expanded so far, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.passes import DIRECT, Passes
from adt_tree.policy import TreeShape, greatest
from adt_tree.roles import Below, Drafter, Prefix
from adt_tree.sampling import Sampling, log_probs
from adt_tree.transfer import to_device
from adt_tree.tree import DraftTree, Pool, StaticTree, root_only_tree, select
from adt_tree.verify import Verdict


@dataclass(frozen=True, slots=True)
class Stem:
    """What trees grow from: the drafter's law at their roots, and how far they may go."""

    log_q: Tensor  # [B, V] after the root
    feature: Tensor  # [G, B, D] the drafter's at the root
    roots: Tensor  # [B]
    bounds: tuple[int, int, int]  # the greatest budget, depth and width of all images
    limits: Tensor  # [B, 3]: each image's depth, width and budget
    gumbel: Tensor  # [B, L, V] the noise of the levels below the roots, as many as the deepest has, or 1
    reach: int


class Growth(Protocol):
    """How a tree grows from the drafter's law at the root."""

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """A tree per image."""


class EagleProposer:
    """The EAGLE drafter as proposer: feeds it the committed path, then grows a tree."""

    def __init__(
        self, drafter: Drafter, sampling: Sampling, growth: Growth, slots: int, passes: Passes = DIRECT
    ) -> None:
        """passes: who runs the growth and what moves it on."""
        self.drafter, self.sampling, self.growth, self.passes = drafter, sampling, growth, passes
        # Target features not yet shown to the drafter, [G, B, A, D], and the code after each, [B, A]: room
        # for the longest path, of which `_pairs` were written last; `_count` [B] of these are valid.
        self._features: Tensor | None = None
        self._codes = torch.zeros(slots, drafter.deepest + 1, dtype=torch.int64, device=drafter.device)
        self._count = torch.ones(slots, dtype=torch.int64, device=drafter.device)
        self._pairs = 1

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer: the prompt's last feature waits for its code."""
        self.drafter.prefill(slot, prompt, prefix)
        last = torch.stack([branch[-1] for branch in prefix.features])
        if self._features is None:  # until now nobody knew its size
            self._features = last[:, None, None].repeat(1, *self._codes.shape, 1)
        self._features[:, slot, 0] = last
        self._codes[slot, 0] = code
        self._count[slot] = 1

    def calls(self, shape: TreeShape) -> int:
        """See Proposer: one extend, and one expand a level below the first."""
        return max(1, shape.depth)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self.drafter.release(slot)
        self._count[slot] = 1

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        assert self._features is not None, "an image was prefilled"
        limits = to_device([(s.depth, s.width, s.budget) for s in shapes], roots.device)
        features, codes = self._features[:, :, : self._pairs], self._codes[:, : self._pairs]
        logits, feature = self.drafter.extend(features, codes, self._count, committed)
        reach, gumbel = self.passes.reach(max(committed)), below(max(1, *(s.depth for s in shapes)))
        tree = self.passes(self._grow, (greatest(shapes), reach), logits, feature, roots, limits, gumbel)
        self._pairs = tree.longest
        return tree

    def _grow(
        self,
        bounds: tuple[int, int, int],
        reach: int,
        logits: Tensor,
        feature: Tensor,
        roots: Tensor,
        limits: Tensor,
        gumbel: Tensor,
    ) -> DraftTree:
        """A tree per slot from the drafter's logits [G, B, V] and feature at the root."""
        log_q = log_probs(logits, self.sampling)
        stem = Stem(log_q, feature, roots, bounds, limits, gumbel, reach)
        return self.growth(self.drafter, self.sampling, stem)

    def observe(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer: pair the features along the path with the codes that follow."""
        assert self._features is not None, "an image was prefilled"
        pairs = verdict.path.shape[1]
        index = verdict.path[None, ..., None].expand(features.shape[0], -1, -1, features.shape[-1])
        self._features[:, :, :pairs] = features.gather(2, index)
        self._codes[:, :pairs] = verdict.codes
        self._count.copy_(verdict.count)


def grow_dynamic(drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
    """EAGLE-2: level by level, the best `width` nodes expand to their `width` best children; the best
    `budget` stay.

    Children of a node are the top of log q + G (G = 0: the top of q), a child's confidence is log
    softmax(log q + G),
    a node's score the sum along its path. Images of smaller shapes take part with -inf scores where theirs
    ends.
    """
    budget, depth, width = stem.bounds
    if min(stem.bounds) == 0:
        return root_only_tree(stem.roots)
    pool = grow_pool(drafter, sampling, stem)
    return select(pool, stem.limits[:, 2], stem.roots, (budget, depth, min(width, stem.gumbel.shape[-1])))


def grow_pool(drafter: Drafter, sampling: Sampling, stem: Stem) -> Pool:
    """The candidates of grow_dynamic, level after level; no budget is looked at, and no shape may be empty in
    all images. A level does not depend on whether deeper ones follow."""
    roots, gumbel = stem.roots, stem.gumbel
    _, most_depth, most_width = stem.bounds
    depth, width, _ = stem.limits.unbind(1)
    images, most_width = len(roots), min(most_width, gumbel.shape[-1])
    beyond = (
        torch.arange(most_width, device=roots.device) >= width[:, None]
    )  # [B, W] ranks an image does not use
    eye = torch.eye(most_width, dtype=torch.bool, device=roots.device).expand(images, -1, -1)

    score, code = (stem.log_q + gumbel[:, 0]).log_softmax(dim=-1).topk(most_width, dim=-1)
    score = score.masked_fill(beyond | (depth < 1)[:, None], float("-inf"))
    pools = [Pool(code, score, torch.full_like(code, -1), code.new_ones(most_width))]
    node = torch.arange(most_width, device=roots.device).expand(
        images, -1
    )  # pool index of each frontier node
    features = stem.feature[:, :, None].expand(-1, -1, most_width, -1)
    ancestors = eye
    for level in range(2, most_depth + 1):
        logits, features = drafter.expand(code, features, ancestors, level - 2, stem.reach)
        confidence = (log_probs(logits, sampling) + gumbel[:, level - 1, None]).log_softmax(dim=-1)
        value, child = confidence.topk(most_width, dim=-1)  # [B, W, W]
        total = value + score[..., None]
        total = total.masked_fill((beyond | (depth < level)[:, None])[:, None], float("-inf")).flatten(1)
        child = child.flatten(1)
        depths = child.new_full((child.shape[1],), level)
        pools.append(Pool(child, total, node.repeat_interleave(most_width, dim=1), depths))
        score, best = total.topk(most_width, dim=1)
        score = score.masked_fill(beyond, float("-inf"))
        code, parent = child.gather(1, best), best // most_width
        node = most_width + (level - 2) * most_width**2 + best
        features = features.gather(2, parent[None, ..., None].expand_as(features))
        ancestors = torch.cat((ancestors.gather(1, parent[..., None].expand_as(ancestors)), eye), dim=2)
    return Pool.join(pools)


class StaticGrowth:
    """EAGLE-1: a fixed topology; child r of a node is the r-th of the top of log q + G, which is a draw
    without replacement from q (Gumbel-top-k, Kool et al. 1903.06059) and the r-th best code where G = 0."""

    def __init__(self, tree: StaticTree, keep_q: bool, device: torch.device) -> None:
        """keep_q: hand the laws the children were drawn from to the verifier (recursive rejection needs
        them)."""
        self.tree, self.keep_q = tree, keep_q
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        self._ancestors = tree.ancestors().to(device)
        self._levels = [self._level(nodes) for nodes in tree.levels]

    def _level(self, nodes: list[int]) -> _Level:
        """Index tensors of the nodes expanded at one depth and of their children."""
        device = self._parents.device
        below = [n for n in range(1, len(self.tree.parents)) if self.tree.parents[n] in nodes]
        above = [self.tree.parents[n] for n in nodes]
        earlier = self.tree.levels[self.tree.depths[nodes[0]] - 1] if nodes != [0] else [0]
        return _Level(
            nodes=torch.tensor(nodes, device=device),
            parents=torch.tensor([earlier.index(n) if nodes != [0] else 0 for n in above], device=device),
            children=torch.tensor(below, device=device),
            slots=torch.tensor([nodes.index(self.tree.parents[n]) for n in below], device=device),
            ranks=torch.tensor([self.tree.ranks[n] for n in below], device=device),
        )

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth."""
        most_depth, roots = stem.bounds[1], stem.roots
        images, nodes = len(roots), sum(depth <= most_depth for depth in self.tree.depths)
        log_q, features = stem.log_q[:, None], stem.feature[:, :, None]
        codes = roots[:, None].repeat(1, nodes)
        valid = self._depths[:nodes] <= stem.limits[:, :1]
        q = log_q.new_zeros(images, nodes, log_q.shape[-1]) if self.keep_q else None
        expanded = roots.new_empty(0)
        for depth, level in enumerate(self._levels[:most_depth]):
            if depth:
                expanded = torch.cat((expanded, level.nodes))
                seen = self._ancestors[level.nodes][:, expanded].expand(images, -1, -1)
                features = features[:, :, level.parents]
                logits, features = drafter.expand(
                    codes[:, level.nodes], features, seen, depth - 1, stem.reach
                )
                log_q = log_probs(logits, sampling)
            value, table = (log_q + stem.gumbel[:, depth, None]).topk(self.tree.width, dim=-1)
            codes[:, level.children] = table[:, level.slots, level.ranks]
            valid[:, level.children] &= value[:, level.slots, level.ranks].isfinite()
            if q is not None:
                q[:, level.nodes] = log_q.exp()
        parents, depths = (x[:nodes].expand(images, -1) for x in (self._parents, self._depths))
        ancestors = self._ancestors[:nodes, :nodes].expand(images, -1, -1)
        return DraftTree(
            codes, parents, depths, ancestors, valid, depth=most_depth, width=self.tree.width, q=q
        )


@dataclass(frozen=True, slots=True)
class _Level:
    """One drafting level of a static tree: nodes expanded, their parents' slots one level up, their
    children."""

    nodes: Tensor
    parents: Tensor
    children: Tensor
    slots: Tensor
    ranks: Tensor
