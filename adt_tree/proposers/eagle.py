"""The proposer with an EAGLE drafter network, which grows dynamic (EAGLE-2) or static (EAGLE-1) trees.

The network predicts the target's next feature from the features so far; the target's head turns it into
logits. After every step it reads the features that the target computed along the accepted path, and drafts
from the last of them.

Dimensions: G guidance branches, B images, A path nodes, W nodes of a level, E nodes that a tree can expand, L
levels, V codes, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.noise import PositionNoise
from adt_tree.policy import TreeShape
from adt_tree.ranges import part
from adt_tree.roles import Drafter, Prefix, Run, StepStart
from adt_tree.sampling import PassSampling, filtered, force, log_probs
from adt_tree.static_trees import StaticTree
from adt_tree.tree import BatchShapes, DraftTree, Pool, Topology, select
from adt_tree.verify import Rule, Verdict


@dataclass(frozen=True, slots=True)
class DraftState:
    """The drafter's state at the roots, and the shapes of the trees to grow from it."""

    logits: Tensor  # [G, B, V] the drafter's logits after the root
    feature: Tensor  # [G, B, D] the drafter's feature of the root
    last_codes: Tensor  # [B] the roots
    shapes: BatchShapes
    noise: PositionNoise  # of shapes.depth positions, so that its layout does not depend on shapes.levels


# Grows a tree per image from the drafter's state at the roots.
Growth = Callable[[Drafter, PassSampling, DraftState], DraftTree]


class EagleProposer:
    """Feeds the accepted path to the drafter, then grows a tree."""

    def __init__(self, drafter: Drafter, growth: Growth, slots: int, run: Run) -> None:
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

    def propose(self, start: StepStart) -> DraftTree:
        assert self._features is not None, "propose() needs a prefilled image"
        pairs = (self._features, self._codes, self._count)
        with part("drafter"):
            return self._run(self._grow, pairs, start)

    def _grow(self, pairs: tuple[Tensor, Tensor, Tensor], start: StepStart) -> DraftTree:
        logits, feature = self.drafter.extend(*pairs, start.longest)
        noise = start.noise_below(start.shapes.depth)
        state = DraftState(logits, feature, start.last_codes, start.shapes, noise)
        return self.growth(self.drafter, start.sampling, state)

    def observe(
        self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict, positions: Tensor
    ) -> None:
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
    growth: Growth = partial(grow_dynamic, expand=target.compile(expand_level))
    if topology is not None:
        growth = StaticGrowth(topology, keep_q, target.device)
    return EagleProposer(drafter, growth, target.slots, target.run)


class Frontier(NamedTuple):
    """The W nodes of every image that expand next. A tuple, because torch.compile returns no dataclasses."""

    codes: Tensor  # [B, W] int64
    scores: Tensor  # [B, W]
    features: Tensor  # [G, B, W, D] the drafter's features of their parents
    ancestors: Tensor  # [B, W, E] bool: their ancestors among the E nodes


def expand_level(
    drafter: Drafter,
    sampling: PassSampling,
    frontier: Frontier,
    noise: PositionNoise,
    outside: Tensor,
    itself: Tensor,
    place: Any,
) -> tuple[Tensor, Tensor, Tensor, Frontier]:
    """Expands a level, by one function of tensors, which --compile compiles. Returns codes and scores of the
    children [B, W * W], the numbers of the W children that expand next [B, W], and the next frontier.

    noise: of the children's position. outside [B, W]: -inf for the ranks of siblings that lie outside the
    shape of an image, else 0. itself [W, E]: which of the E nodes the frontier is. place: see Drafter.places.
    """
    width, ancestors = frontier.codes.shape[1], frontier.ancestors | itself
    logits, features = drafter.expand(frontier.codes, frontier.features, ancestors, place)
    score, child = best_children(logits, sampling, noise, width)  # [B, W, W]
    codes = child.flatten(1)
    scores = (score + frontier.scores[..., None] + outside[:, None]).flatten(1)
    best_scores, best = scores.topk(width, dim=1)
    parent = best // width
    following = Frontier(
        codes=codes.gather(1, best),
        scores=best_scores + outside,
        features=features.gather(2, parent[None, ..., None].expand_as(features)),
        ancestors=ancestors.gather(1, parent[..., None].expand_as(ancestors)),
    )
    return codes, scores, best, following


def grow_dynamic(
    drafter: Drafter,
    sampling: PassSampling,
    state: DraftState,
    expand: Callable[..., tuple[Tensor, Tensor, Tensor, Frontier]] = expand_level,
) -> DraftTree:
    """Returns trees grown as in EAGLE-2: on every level the best `width` nodes expand to their `width` best
    children, and of all these nodes the best `budget` form the tree.

    The children of a node are the codes of greatest log q + G, with the noise G of their position (0 at
    temperature 0). The confidence of a child is its log softmax(log q + G), and the score of a node is the
    sum of the confidences along its path. All images grow to the largest shape; the nodes outside the shape
    of an image have the score -inf. expand: expand_level(), or its compiled form.
    """
    shapes, roots, width = state.shapes, state.last_codes, state.shapes.width
    depth, widths, _ = shapes.limits.unbind(1)
    rank, level = (torch.arange(size, device=roots.device) for size in (width, shapes.depth))
    absent = (rank >= widths[:, None]) | (level[:, None, None] >= depth[:, None])  # [L, B, W]
    outside = state.logits.new_zeros(absent.shape).masked_fill_(absent, float("-inf"))
    # Every level has tensors of the same layout, so that one compiled function serves all.
    expanded_nodes = (shapes.depth - 1) * width
    itself = torch.eye(expanded_nodes, dtype=torch.bool, device=roots.device).split(width)
    places = drafter.places(level[:-1].repeat_interleave(width), [width] * (shapes.depth - 1))
    score, code = best_children(state.logits[:, :, None], sampling, state.noise.level(0), width)
    frontier = Frontier(
        codes=code[:, 0],
        scores=score[:, 0] + outside[0],
        features=state.feature[:, :, None].repeat(1, 1, width, 1),
        ancestors=absent.new_zeros(len(roots), width, expanded_nodes),
    )
    codes, scores, expanded = [frontier.codes], [frontier.scores], list[Tensor]()
    node = rank.expand(len(roots), -1)  # of the frontier: indices in the pool
    for below in range(1, shapes.levels):
        noise, of_level = state.noise.level(below), (outside[below], itself[below - 1], places[below - 1])
        code, score, best, frontier = expand(drafter, sampling, frontier, noise, *of_level)
        codes.append(code)
        scores.append(score)
        expanded.append(node)
        # The pool holds W nodes of level 1, then W * W nodes of each further level.
        node = width + (below - 1) * width**2 + best
    # Each expanded node has `width` children, one after the other. Level 1 comes before them: its numbers are
    # negative, so that its depth is 1. The empty slice is for trees of that level alone.
    parents = torch.cat((node[:, :0], *expanded), dim=1).repeat_interleave(width, dim=1)
    number = torch.arange(-width, parents.shape[1], device=roots.device)
    pool = Pool(
        codes=torch.cat(codes, dim=1),
        scores=torch.cat(scores, dim=1),
        parents=F.pad(parents, (width, 0), value=-1),
        depths=number // width**2 + 2,
    )
    return select(pool, shapes, roots)


def best_children(
    logits: Tensor, sampling: PassSampling, noise: PositionNoise, width: int
) -> tuple[Tensor, Tensor]:
    """Returns the log-confidences log softmax(log q + G) of the `width` best codes after every node, and
    these codes, both [B, W, width].

    logits [G, B, W, V]: the drafter's; q is the distribution that they give. noise: of the next position.
    """
    # log q itself is never normalised: the softmax of log q + G does that.
    log_q = force(filtered(logits, sampling), noise.forced)
    return (log_q + noise.gumbel).log_softmax(dim=-1).topk(width, dim=-1)


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
        self._widths = [len(nodes) for nodes in tree.levels[1:]]
        expanded = [node for nodes in tree.levels[1:] for node in nodes]
        self._expanded = torch.tensor(expanded, dtype=torch.int64, device=device)
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
        logits, features = state.logits[:, :, None], state.feature[:, :, None]
        codes = last_codes[:, None].repeat(1, nodes)
        valid = self._depths[:nodes] <= state.shapes.limits[:, :1]
        confidence = logits.new_zeros(images, nodes)
        q = logits.new_zeros(images, nodes, logits.shape[-1]) if self.keep_q else None
        places = drafter.places(self._depths[self._expanded] - 1, self._widths)
        for depth, level in enumerate(self._levels[: state.shapes.levels]):
            noise = state.noise.level(depth)
            if depth:
                ancestors = self._ancestors[level.nodes][:, self._expanded].expand(images, -1, -1)
                features = features[:, :, level.parents]
                logits, features = drafter.expand(
                    codes[:, level.nodes], features, ancestors, places[depth - 1]
                )
            value, code = best_children(logits, sampling, noise, self.tree.width)
            value = value[:, level.child_parents, level.ranks]
            codes[:, level.children] = code[:, level.child_parents, level.ranks]
            parents = self._parents[level.children]
            valid[:, level.children] &= value.isfinite() & valid[:, parents]
            confidence[:, level.children] = value + confidence[:, parents]
            if q is not None:
                q[:, level.nodes] = log_probs(logits, sampling, noise.forced).exp()
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
