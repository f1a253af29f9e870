"""Verification: a tree and the target's distribution at every node -> accepted path and next code.

Every rule is vectorised over images and nodes and never reads back: a node is accepted or not, all at once,
and the path is what hangs together from the root.

Dimensions: B images, N nodes, V codes, A path slots (DraftTree.longest), K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adt_tree.noise import ACCEPT, DRAFT, RESIDUAL, Noise, uniform
from adt_tree.relax import Relaxation
from adt_tree.tree import DraftTree, rows_at

TINY = torch.finfo(torch.float32).tiny  # a divisor where the quotient is not used
LEAST = 1e-25  # mass below which the smallest normal number is no longer small


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a cycle. An image commits `count` codes: count - 1 accepted draft codes and the next
    one."""

    path: Tensor  # [B, A] int64: nodes walked, the root first; beyond count: anything valid as an index
    count: Tensor  # [B] int64, >= 1: nodes on the path, the root included
    codes: Tensor  # [B, A] int64: codes[:, j] follows path node j; the last valid one is recovered or bonus


class Rule(Protocol):
    """A verification rule together with all the randomness it uses."""

    noise: Noise  # what drafts are drawn with

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw codes [B] from log_p [B, V] at positions [B] (the first code of an image)."""

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Judge a tree: log_p [B, N, V], the same under the noise of each node's position, positions [B] of
        the first code not yet committed."""


def verdict_from_hits(tree: DraftTree, hit: Tensor, choice: Tensor) -> Verdict:
    """Walk down accepted children: hit [B, N] (at most one child of a node), choice [B, N] the code after
    each node."""
    blocked = tree.ancestors & ~hit[:, None, :]
    return _walk(tree, ~blocked.any(dim=2), choice)


def _walk(tree: DraftTree, alive: Tensor, choice: Tensor) -> Verdict:
    """The verdict of the one path that alive [B, N] marks."""
    images, nodes = alive.shape
    slots = tree.longest
    number = torch.arange(nodes, device=alive.device).expand(images, -1)
    path = torch.zeros((images, slots + 1), dtype=torch.int64, device=alive.device)
    path.scatter_(1, tree.depths.masked_fill(~alive, slots), number)
    path = path[:, :slots]
    count = alive.sum(dim=1)
    follow = tree.codes.gather(1, path).roll(-1, dims=1)
    last = (count - 1)[:, None]
    codes = follow.scatter(1, last, choice.gather(1, path.gather(1, last)))
    return Verdict(path, count, codes)


def accepted_nodes(tree: DraftTree, verdict: Verdict) -> Tensor:
    """[B, N] bool: the nodes on the accepted path, the root included."""
    slot = torch.arange(verdict.path.shape[1], device=verdict.path.device)
    path = verdict.path.masked_fill(slot >= verdict.count[:, None], 0)
    return torch.zeros_like(tree.valid).scatter_(1, path, True)


class Coupled:
    """Coupled verification, lossless at every temperature.

    The choice after node v at position i is y = argmax(log p_v + G_i), exactly what plain AR commits; a
    child is accepted iff it carries y. So the output depends on neither tree nor drafter. Daliri et al.
    2408.07978. With a relaxation a child x is accepted iff y is in A(x): an exact match first, then the
    child in whose list y ranks nearest. Randomness: the position-keyed noise, nothing else.
    """

    def __init__(self, noise: Noise, relaxation: Relaxation | None = None) -> None:
        self.noise, self.relaxation = noise, relaxation

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax(log p + G) [B]."""
        return (log_p + self.noise.gumbel(seeds, positions[:, None])[:, 0]).argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Accept children that carry their parent's choice."""
        choice = perturbed.argmax(dim=-1)
        wanted = choice.gather(1, tree.parents)
        if self.relaxation is None:
            hit = (tree.codes == wanted) & tree.valid
        else:
            hit = self._relaxed(tree, log_p, wanted, self.relaxation)
        hit[:, 0] = True
        return verdict_from_hits(tree, hit, choice)

    @staticmethod
    def _relaxed(tree: DraftTree, log_p: Tensor, wanted: Tensor, relaxation: Relaxation) -> Tensor:
        near, admissible, _ = relaxation.aggregate(rows_at(log_p.exp(), tree.parents), tree.codes)
        match = (near == wanted[..., None]) & admissible
        far = near.shape[-1] + 1
        rank = torch.where(match.any(dim=-1), match.int().argmax(dim=-1) + 1, far)
        rank = rank.masked_fill(tree.codes == wanted, 0).masked_fill(~tree.valid, far)
        # One child per parent: the least rank, then the earliest node.
        nodes = tree.nodes
        key = rank * nodes + torch.arange(nodes, device=rank.device)
        key[:, 0] = far * nodes  # the root is nobody's child
        best = torch.full_like(key, far * nodes).scatter_reduce(1, tree.parents, key, "amin")
        return (key == best.gather(1, tree.parents)) & (rank < far)


class Control(Coupled):
    """Bounds of a measurement, whatever the target says: no draft is accepted, or the first child of every
    node is.

    What they generate is no image of the model. They say what a step costs and what perfect drafts would
    give. The code after the last node is the target's own, and so is the first one of an image.
    """

    def __init__(self, noise: Noise, accept: bool) -> None:
        """accept: all; else none."""
        super().__init__(noise)
        self.accept = accept

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Walk the first children, or none."""
        hit = torch.zeros_like(tree.valid)
        if self.accept and tree.width:
            child, exists = next(iter(children(tree)))
            hit |= torch.zeros_like(hit).scatter(1, child, exists)
        hit[:, 0] = True
        return verdict_from_hits(tree, hit, perturbed.argmax(dim=-1))


class GreedyRelaxed:
    """LANTERN at temperature 0 as published: x passes iff p(x) + S_j* makes it the mode of its parent's
    distribution.

    p = softmax of the unfiltered guided logits. Several children of a node may pass: the longest path wins,
    at ties the one whose leaf comes first in `leaf_order` (the released code's candidate rows). The next
    code is the argmax.
    """

    def __init__(self, num_codes: int, relaxation: Relaxation, static_order: Tensor | None = None) -> None:
        """static_order [N] int64: each node's row rank in a static tree; None: node order (dynamic trees)."""
        self.noise = Noise(num_codes, silent=True)
        self.relaxation, self.static_order = relaxation, static_order

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax log p [B]."""
        return log_p.argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Accept children that overtake the mode with the mass they borrow."""
        choice = log_p.argmax(dim=-1)
        mode = choice.gather(1, tree.parents)
        above = rows_at(log_p.exp(), tree.parents)
        _, _, mass = self.relaxation.aggregate(above, tree.codes)
        own = above.gather(-1, tree.codes[..., None])[..., 0] + mass
        highest = above.gather(-1, mode[..., None])[..., 0]
        overtakes = (own > highest) | ((own == highest) & (tree.codes < mode))
        passes = ((tree.codes == mode) | overtakes) & tree.valid
        passes[:, 0] = True
        alive = ~(tree.ancestors & ~passes[:, None, :]).any(dim=2)
        end = self._end(tree, alive)
        on_path = tree.ancestors.gather(1, end[:, None, None].expand(-1, 1, tree.nodes))[:, 0]
        return _walk(tree, on_path, choice)

    def _end(self, tree: DraftTree, alive: Tensor) -> Tensor:
        """The deepest passing node [B]; at ties the one above the first leaf."""
        nodes = tree.nodes
        number = torch.arange(nodes, device=alive.device)
        order = number if self.static_order is None else self.static_order[:nodes]  # the last trees are cut
        inner = torch.zeros_like(alive).scatter(1, tree.parents[:, 1:], True)
        row = order.expand_as(alive).masked_fill(inner | ~tree.valid, nodes)
        # Over the leaves below each node.
        first = row[:, :, None].masked_fill(~tree.ancestors, nodes).amin(dim=1)
        key = (tree.depth - tree.depths) * (nodes + 1) + first
        return key.masked_fill(~alive, (tree.depth + 1) * (nodes + 1)).argmin(dim=1)


class Rejection:
    """The published sampling rules, lossless: recursive rejection over each node's children in node order.

    Static trees (tree.q given; RRSw, 2402.14160): accept x with p(x) / q(x); on rejection p <- norm(max(p -
    q, 0)), q <- norm(q without x). Dynamic trees (EAGLE-2, ADT-Tree; q = 1): accept x with p(x); on
    rejection p(x) <- 0. Nothing accepted: the next code is drawn from the residual; path exhausted: from p
    at the leaf. LANTERN: accept with (p(x) + S_j*) / q(x); a rejection takes the mass of A(x), and only
    that, from the residual. reference=True keeps the released code's arithmetic instead (its k + 1 zeroing,
    in q for static trees, and a uniform residual where nothing is left). Randomness: one uniform per node and
    one Gumbel vector per image, keyed by the root's position on streams of their own.
    """

    def __init__(
        self, num_codes: int, static: bool, relaxation: Relaxation | None = None, reference: bool = False
    ) -> None:
        """static: drafts are drawn from q on a stream of their own; else they are the top codes of q."""
        self.noise = Noise(num_codes, silent=not static, stream=DRAFT)
        self._residual_noise = Noise(num_codes, silent=False, stream=RESIDUAL)
        self.relaxation, self.reference = relaxation, reference

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """A draw [B] by the Gumbel-max trick on the residual stream."""
        return (log_p + self._residual_noise.gumbel(seeds, positions[:, None])[:, 0]).argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Accept children by one uniform each."""
        chances = uniform(seeds, positions[:, None], tree.nodes, ACCEPT)[:, 0].float()
        hit, residual = self.judge(tree, log_p.exp(), chances)
        noise = self._residual_noise.gumbel(seeds, positions[:, None])
        return verdict_from_hits(tree, hit, (residual.log() + noise).argmax(dim=-1))

    def judge(self, tree: DraftTree, p: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted nodes hit [B, N] and the distribution [B, N, V] left at each node after its children, from
        p [B, N, V] and one uniform per node, chances [B, N]. Deterministic given these."""
        hit = torch.zeros_like(tree.valid)
        hit[:, 0] = True
        residual, q = p, tree.q
        done = torch.zeros_like(tree.valid)  # nodes one of whose children was accepted
        for child, exists in children(tree):
            code = tree.codes.gather(1, child)[..., None]
            mass, merged = self._credit(residual, code[..., 0])
            chance = residual.gather(-1, code)[..., 0] + mass
            if q is not None:
                drawn = q.gather(-1, code)[..., 0]
                exists = exists & (drawn > 0)  # passed over whatever was drawn, so no distribution changes
                chance = chance / drawn.clamp_min(TINY)
            accepted = exists & ~done & (chances.gather(1, child) <= chance)
            hit |= torch.zeros_like(hit).scatter(1, child, accepted)
            done |= accepted
            rejected = (exists & ~done)[..., None]
            left = self._take(residual, q, code, merged)
            residual = torch.where(rejected, self._renormalise(left, p), residual)
            if q is not None:
                q = torch.where(rejected, self._exclude(q, code), q)
        return hit, residual

    def _credit(self, p: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """S_j* [B, N] and the mask [B, N, V] of the codes merged into x, which a rejection takes as well."""
        merged = torch.zeros_like(p, dtype=torch.bool)
        if self.relaxation is None:
            return torch.zeros_like(p[..., 0]), merged
        near, admissible, mass = self.relaxation.aggregate(p, code)
        if self.reference:  # the released code takes k + 1 neighbours as soon as one is admissible
            near = self.relaxation.table[code][..., : self.relaxation.k + 1]
            admissible = admissible[..., :1].expand_as(near)
        return mass, merged.scatter(-1, near, admissible)

    def _take(self, p: Tensor, q: Tensor | None, code: Tensor, merged: Tensor) -> Tensor:
        """What is left of p [B, N, V], unnormalised, after x = code [B, N, 1] was rejected."""
        if q is None:
            return p.scatter(-1, code, 0.0).masked_fill(merged, 0.0)
        if self.reference:  # the released code spares the neighbours in q, so that they keep their mass in p
            return (p - q.masked_fill(merged, 0.0)).clamp_min(0.0)
        return (p - q).clamp_min(0.0).masked_fill(merged, 0.0)

    def _exclude(self, q: Tensor, code: Tensor) -> Tensor:
        """The distribution of the next draw without replacement: q [B, N, V] without x = code [B, N, 1].

        All zero where fp32 no longer holds the proportions of what is left: such draws are passed over.
        """
        without = q.scatter(-1, code, 0.0)
        total = without.sum(-1, keepdim=True)
        return torch.where(total > LEAST, without / total.clamp_min(LEAST), 0.0)

    def _renormalise(self, left: Tensor, own: Tensor) -> Tensor:
        """left / sum; where nothing is left, the node's own distribution (reference: uniform)."""
        total = left.sum(dim=-1, keepdim=True)
        empty = torch.full_like(own, 1 / own.shape[-1]) if self.reference else own
        return torch.where(total > 0, left / total.clamp_min(TINY), empty)


def children(tree: DraftTree) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (child [B, N] int64, exists [B, N] bool) for the first, second, ... child of every node in
    node order."""
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & tree.valid[:, None, :]
    same[:, :, 0] = False  # the root is its own parent in the arrays, and nobody's child
    rank = (same & torch.ones_like(same[0]).tril(-1)).sum(dim=2).masked_fill(~tree.valid, tree.nodes)
    rank[:, 0] = tree.nodes
    number = torch.arange(tree.nodes, device=rank.device).expand_as(rank)
    for place in range(tree.width):
        child = torch.zeros_like(rank).scatter_reduce(1, tree.parents, number * (rank == place), "amax")
        yield child, child > 0
