"""The EAGLE drafter as proposer, growing dynamic (EAGLE-2) or static (EAGLE-1) trees.

A small network continues the target's features; its head is the target's. So it drafts where the target has
just been, and is fed the target's true features along every accepted path. Dimensions: G guidance branches,
B images, A path nodes, W nodes a level, E nodes expanded so far, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, NoiseBelow, Prefix, Run, Setup, call
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import BatchShapes, DraftTree, Pool, StaticTree, root_only_tree, select
from adt_tree.verify import Verdict


@dataclass(frozen=True, slots=True)
class DraftState:
    """What trees grow from: what the drafter says after the last committed codes, and how far they may go."""

    log_q: Tensor  # [B, V] after the root
    feature: Tensor  # [G, B, D] the drafter's at the root
    last_codes: Tensor  # [B]
    shapes: BatchShapes
    noise: Tensor  # [B, L, V] of the levels below the roots, as many as the deepest tree has, or 1


# How a tree per image grows from the drafter's state at the root.
Growth = Callable[[Drafter, Sampling, DraftState], DraftTree]


class EagleProposer:
    """Feeds the drafter the committed path, then grows a tree."""

    def __init__(
        self, drafter: Drafter, sampling: Sampling, growth: Growth, slots: int, run: Run = call
    ) -> None:
        self.drafter, self.sampling, self.growth, self._run = drafter, sampling, growth, run
        # Target features not yet shown to the drafter, [G, B, A, D], and the code after each, [B, A]; of
        # these `_count` [B] are valid. Features have no size before the first prefill.
        self._features: Tensor | None = None
        self._codes = torch.zeros(slots, 1, dtype=torch.int64, device=drafter.device)
        self._count = torch.ones(slots, dtype=torch.int64, device=drafter.device)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """The prompt's last feature waits for its code."""
        self.drafter.prefill(slot, prompt, prefix)
        last = torch.stack([branch[-1] for branch in prefix.features])
        if self._features is None:
            self._features = last[:, None, None].repeat(1, *self._codes.shape, 1)
        self._features[:, slot, 0] = last
        self._codes[slot, 0] = code
        self._count[slot] = 1

    def calls(self, shape: TreeShape) -> int:
        """One extend, and one expand per level below the first."""
        return max(1, shape.depth)

    def release(self, slot: int) -> None:
        """An idle slot feeds one pair, which nobody reads."""
        self.drafter.release(slot)
        self._count[slot] = 1

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """Show the drafter what was committed since the last call; grow a tree per slot from its state at
        the new roots."""
        assert self._features is not None, "an image was prefilled"
        pairs = (self._features, self._codes, self._count)
        noise = noise_below(max(1, shapes.levels))
        return self._run(self._grow, pairs, last_codes, shapes, noise, self.drafter.context(committed))

    def _grow(
        self,
        pairs: tuple[Tensor, Tensor, Tensor],
        last_codes: Tensor,
        shapes: BatchShapes,
        noise: Tensor,
        context: Hashable,
    ) -> DraftTree:
        logits, feature = self.drafter.extend(*pairs, context)
        state = DraftState(log_probs(logits, self.sampling), feature, last_codes, shapes, noise)
        return self.growth(self.drafter, self.sampling, state)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Pair the features along the path with the codes that follow."""
        self._features, self._codes, self._count = self._run(pairs_on_path, features, verdict)


def pairs_on_path(features: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the features [G, B, A, D] of the nodes on the path, the codes [B, A] that follow, and how many
    are valid [B]. They are copies: a refill writes into them."""
    index = verdict.path[None, ..., None].expand(features.shape[0], -1, -1, features.shape[-1])
    return features.gather(2, index), verdict.codes.clone(), verdict.count.clone()


def make(setup: Setup) -> EagleProposer:
    """Returns the proposer of eagle-1 (a static tree), eagle-2 and adt-tree (dynamic trees)."""
    drafter = setup.model.drafter(setup.target, setup.shape.depth, setup.shape.width)
    growth: Growth = grow_dynamic
    if isinstance(setup.tree, StaticTree):
        keep_q = setup.method.verify == "rejection" and not setup.method.greedy
        growth = StaticGrowth(setup.tree, keep_q, setup.target.device)
    return EagleProposer(drafter, setup.sampling, growth, setup.target.slots, setup.target.run)


def grow_dynamic(drafter: Drafter, sampling: Sampling, state: DraftState) -> DraftTree:
    """EAGLE-2: level by level, the best `width` nodes expand to their `width` best children; the best
    `budget` of all stay.

    Children of a node are the top of log q + G (G = 0: the top of q), a child's confidence is log
    softmax(log q + G), a node's score the sum along its path. Images of smaller shapes take part with -inf
    scores where theirs ends.

    The frontier is W nodes per image: their codes [B, W], path scores, places in the pool (`node`), features
    and ancestors [B, W, E] over everything expanded so far.
    """
    if state.shapes.empty:
        return root_only_tree(state.last_codes)
    depth, width, _ = state.shapes.limits.unbind(1)
    images, most_width = len(state.last_codes), state.shapes.width
    rank = torch.arange(most_width, device=state.last_codes.device)
    beyond = rank >= width[:, None]  # [B, W] ranks an image does not use
    eye = torch.eye(most_width, dtype=torch.bool, device=rank.device).expand(images, -1, -1)

    score, code = (state.log_q + state.noise[:, 0]).log_softmax(dim=-1).topk(most_width, dim=-1)
    score = score.masked_fill(beyond | (depth < 1)[:, None], float("-inf"))
    pools = [Pool(code, score, torch.full_like(code, -1), code.new_ones(most_width))]
    node = rank.expand(images, -1)
    features = state.feature[:, :, None].expand(-1, -1, most_width, -1)
    ancestors = eye
    for level in range(2, state.shapes.levels + 1):
        logits, features = drafter.expand(code, features, ancestors, level - 2)
        confidence = (log_probs(logits, sampling) + state.noise[:, level - 1, None]).log_softmax(dim=-1)
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
    return select(Pool.join(pools), state.shapes, state.last_codes)


class StaticGrowth:
    """EAGLE-1: a fixed topology; child r of a node is the r-th of the top of log q + G, which is a draw
    without replacement from q (Gumbel-top-k, Kool et al. 1903.06059) and the r-th best code where G = 0."""

    def __init__(self, tree: StaticTree, keep_q: bool, device: torch.device) -> None:
        """keep_q: hand what the children were drawn from to the verifier (recursive rejection needs it)."""
        self.tree, self.keep_q = tree, keep_q
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        self._ancestors = tree.ancestors().to(device)
        self._levels = [self._level(depth) for depth in range(tree.depth)]

    def _level(self, depth: int) -> _Level:
        """The nodes expanded at one depth and their children, which are all nodes one level deeper."""
        nodes, above = self.tree.levels[depth], self.tree.levels[depth - 1] if depth else [0]
        below = [n for n, own in enumerate(self.tree.depths) if own == depth + 1]
        index = partial(torch.tensor, device=self._parents.device)
        return _Level(
            nodes=index(nodes),
            parents=index([above.index(self.tree.parents[n]) for n in nodes]),
            children=slice(below[0], below[-1] + 1),
            slots=index([nodes.index(self.tree.parents[n]) for n in below]),
            ranks=index([self.tree.ranks[n] for n in below]),
        )

    def __call__(self, drafter: Drafter, sampling: Sampling, state: DraftState) -> DraftTree:
        """The tree, cut to the deepest level of all images."""
        most_depth, last_codes = state.shapes.depth, state.last_codes
        images, nodes = len(last_codes), sum(depth <= most_depth for depth in self.tree.depths)
        log_q, features = state.log_q[:, None], state.feature[:, :, None]
        codes = last_codes[:, None].repeat(1, nodes)
        valid = self._depths[:nodes] <= state.shapes.limits[:, :1]
        confidence = log_q.new_zeros(images, nodes)
        q = log_q.new_zeros(images, nodes, log_q.shape[-1]) if self.keep_q else None
        expanded = last_codes.new_empty(0)
        for depth, level in enumerate(self._levels[: state.shapes.levels]):
            if depth:
                expanded = torch.cat((expanded, level.nodes))
                seen = self._ancestors[level.nodes][:, expanded].expand(images, -1, -1)
                features = features[:, :, level.parents]
                logits, features = drafter.expand(codes[:, level.nodes], features, seen, depth - 1)
                log_q = log_probs(logits, sampling)
            perturbed = log_q + state.noise[:, depth, None]
            value, table = perturbed.topk(self.tree.width, dim=-1)
            value, own = value[:, level.slots, level.ranks], perturbed.logsumexp(dim=-1)[:, level.slots]
            codes[:, level.children] = table[:, level.slots, level.ranks]
            valid[:, level.children] &= value.isfinite()
            confidence[:, level.children] = value - own + confidence[:, self._parents[level.children]]
            if q is not None:
                q[:, level.nodes] = log_q.exp()
        parents, depths = (x[:nodes].expand(images, -1) for x in (self._parents, self._depths))
        ancestors = self._ancestors[:nodes, :nodes].expand(images, -1, -1)
        return DraftTree(codes, parents, depths, ancestors, valid, most_depth, self.tree.width, q, confidence)


@dataclass(frozen=True, slots=True)
class _Level:
    """One drafting level of a static tree: nodes expanded, their parents' slots one level up, their
    children."""

    nodes: Tensor
    parents: Tensor
    children: slice
    slots: Tensor
    ranks: Tensor
