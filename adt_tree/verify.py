"""Verification rules: which path of a draft tree is accepted, and which code follows it.

A rule decides about all nodes of all images at once, with tensor operations alone, so the host never waits
for it. The accepted path is the chain of accepted nodes that begins at the root. x is a drafted code; A(x)
and S_j* are LANTERN's (adt_tree.lantern).

Dimensions: B images, N nodes, V codes, A path slots (DraftTree.longest), K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adt_tree.lantern import Relaxation
from adt_tree.noise import ACCEPT, DRAFT, RESIDUAL, Noise, uniform
from adt_tree.tree import DraftTree, rows_at

TINY = torch.finfo(torch.float32).tiny  # replaces a divisor of 0 where the quotient is not used
MIN_MASS = 1e-25  # total mass below which fp32 cannot represent the proportions of its parts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a step: every image commits `count` codes, count - 1 accepted drafts and one more.

    Example: the path root -> 3 -> 5 is accepted, and the target chose code y after node 5. Then path is
    [0, 3, 5], count is 3, and codes are [code of 3, code of 5, y].
    """

    path: Tensor  # [B, A] int64: accepted nodes, the root first; entries from count on are arbitrary indices
    count: Tensor  # [B] int64: nodes on the path, the root included
    codes: Tensor  # [B, A] int64: codes[:, j] follows node path[:, j]; code count - 1 is the target's choice


class Rule(Protocol):
    """A verification rule, with all the randomness that it uses."""

    noise: Noise  # the noise with which the proposer samples drafts

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Returns codes [B] sampled from log_p [B, V] at positions [B]: the first codes of images."""

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """Returns the accepted path of every tree.

        log_p [B, N, V] is the target's distribution after each node, and perturbed [B, N, V] is log_p plus
        the noise of the position after the node. positions [B]: of the first code not yet committed.
        """


def root_verdict(choice: Tensor) -> Verdict:
    """Returns the verdict for trees that consist of the root: the target's choice [B, 1] follows it."""
    root = torch.zeros_like(choice)
    return Verdict(root, root[:, 0] + 1, choice)


def verdict_from_hits(tree: DraftTree, hit: Tensor, choice: Tensor) -> Verdict:
    """Returns the verdict for accepted nodes hit [B, N], of which no two are children of one node.

    choice [B, N]: the code that the target chose after each node.
    """
    blocked = tree.ancestors & ~hit[:, None, :]
    return _walk(tree, ~blocked.any(dim=2), choice)


def _walk(tree: DraftTree, alive: Tensor, choice: Tensor) -> Verdict:
    """Returns the verdict for the nodes of one path per image, marked by alive [B, N]."""
    images, nodes = alive.shape
    slots = tree.longest
    number = torch.arange(nodes, device=alive.device).expand(images, -1)
    path = torch.zeros((images, slots + 1), dtype=torch.int64, device=alive.device)
    # Every live node writes its number at its depth; the others write to an extra column, which is dropped.
    path.scatter_(1, tree.depths.masked_fill(~alive, slots), number)
    path = path[:, :slots]
    count = alive.sum(dim=1)
    # A path node is followed by the code of the next node, and the last one by the target's choice.
    next_codes = tree.codes.gather(1, path).roll(-1, dims=1)
    last = (count - 1)[:, None]
    codes = next_codes.scatter(1, last, choice.gather(1, path.gather(1, last)))
    return Verdict(path, count, codes)


def accepted_nodes(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Returns [B, N] bool, true for the nodes on the accepted path, the root included."""
    slot = torch.arange(verdict.path.shape[1], device=verdict.path.device)
    path = verdict.path.masked_fill(slot >= verdict.count[:, None], 0)
    return torch.zeros_like(tree.valid).scatter_(1, path, True)


class Coupled:
    """Coupled verification, lossless at every temperature (Daliri et al., 2408.07978).

    The target's choice after node v at position i is y = argmax(log p_v + G_i), which is exactly the code
    that the AR baseline commits there. A child is accepted if and only if it carries y, so the output depends
    neither on the tree nor on the drafter. With LANTERN a child x is accepted if y is in A(x); if several
    are, an exact match comes first, then the child in whose neighbour list y ranks nearest. The only
    randomness is the noise, which is keyed by seed and position."""

    def __init__(self, noise: Noise, relaxation: Relaxation | None = None) -> None:
        self.noise, self.relaxation = noise, relaxation

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return (log_p + self.noise.gumbel(seeds, positions[:, None])[:, 0]).argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        choice = perturbed.argmax(dim=-1)
        chosen_by_parent = choice.gather(1, tree.parents)
        if self.relaxation is None:
            hit = (tree.codes == chosen_by_parent) & tree.valid
        else:
            hit = self._relaxed(tree, log_p, chosen_by_parent, self.relaxation)
        hit[:, 0] = True
        return verdict_from_hits(tree, hit, choice)

    @staticmethod
    def _relaxed(tree: DraftTree, log_p: Tensor, chosen_by_parent: Tensor, relaxation: Relaxation) -> Tensor:
        """Returns the accepted nodes [B, N], at most one child of every node."""
        near, admissible, _ = relaxation.aggregate(rows_at(log_p.exp(), tree.parents), tree.codes)
        match = (near == chosen_by_parent[..., None]) & admissible
        far = near.shape[-1] + 1
        rank = torch.where(match.any(dim=-1), match.int().argmax(dim=-1) + 1, far)
        rank = rank.masked_fill(tree.codes == chosen_by_parent, 0).masked_fill(~tree.valid, far)
        # Of several matching children the one of the lowest rank is accepted, at ties the earliest node.
        nodes = tree.nodes
        key = rank * nodes + torch.arange(nodes, device=rank.device)
        key[:, 0] = far * nodes  # the root is its own parent in the arrays, but must not compete
        best = torch.full_like(key, far * nodes).scatter_reduce(1, tree.parents, key, "amin")
        return (key == best.gather(1, tree.parents)) & (rank < far)


class GreedyRelaxed:
    """LANTERN at temperature 0 as published: x passes if p(x) + S_j* makes it the mode of its parent's
    distribution.

    p is the softmax of the guided logits without filters. Several children of a node may pass. The longest
    path wins; at ties, the path whose leaf comes first in the released code's order of candidate rows. The
    next code is the argmax. No randomness is used.
    """

    def __init__(self, num_codes: int, relaxation: Relaxation, static_order: Tensor | None = None) -> None:
        """static_order [N] int64: the rank of each node's candidate row in a static tree; None: the order of
        the nodes, as in dynamic trees."""
        self.noise = Noise(num_codes, silent=True)
        self.relaxation, self.static_order = relaxation, static_order

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return log_p.argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        choice = log_p.argmax(dim=-1)
        mode = choice.gather(1, tree.parents)
        above = rows_at(log_p.exp(), tree.parents)
        _, _, mass = self.relaxation.aggregate(above, tree.codes)
        relaxed = above.gather(-1, tree.codes[..., None])[..., 0] + mass
        highest = above.gather(-1, mode[..., None])[..., 0]
        overtakes = (relaxed > highest) | ((relaxed == highest) & (tree.codes < mode))
        passes = ((tree.codes == mode) | overtakes) & tree.valid
        passes[:, 0] = True
        alive = ~(tree.ancestors & ~passes[:, None, :]).any(dim=2)
        end = self._end(tree, alive)
        on_path = tree.ancestors.gather(1, end[:, None, None].expand(-1, 1, tree.nodes))[:, 0]
        return _walk(tree, on_path, choice)

    def _end(self, tree: DraftTree, alive: Tensor) -> Tensor:
        """Returns the deepest node [B] of `alive`; at ties the one above the first leaf."""
        nodes = tree.nodes
        number = torch.arange(nodes, device=alive.device)
        # Trees at the end of an image are cut, so they may have fewer nodes than the static tree.
        order = number if self.static_order is None else self.static_order[:nodes]
        inner = torch.zeros_like(alive).scatter(1, tree.parents[:, 1:], True)
        row = order.expand_as(alive).masked_fill(inner | ~tree.valid, nodes)
        # The first row among the leaves below each node.
        first = row[:, :, None].masked_fill(~tree.ancestors, nodes).amin(dim=1)
        key = (tree.depth - tree.depths) * (nodes + 1) + first
        return key.masked_fill(~alive, (tree.depth + 1) * (nodes + 1)).argmin(dim=1)


class Rejection:
    """The published sampling rules, lossless: recursive rejection over each node's children in node order.

    - Static trees (tree.q is given; RRSw, 2402.14160) accept x with probability p(x) / q(x). A rejection sets
      p <- norm(max(p - q, 0)) and q <- norm(q without x).
    - Dynamic trees (EAGLE-2, ADT-Tree; q = 1) accept x with probability p(x). A rejection sets p(x) <- 0.
    - LANTERN accepts with (p(x) + S_j*) / q(x), and a rejection also removes the mass of A(x) from p.

    If no child is accepted, the next code is sampled from what is left of p; after a leaf, from p.
    Randomness: one uniform per node and one Gumbel vector per image, keyed by the root's position, on two
    separate streams.

    With reference=True the rule repeats the released code's arithmetic, which differs in three ways. A
    rejection removes k + 1 neighbours as soon as one is admissible. In static trees it removes them from q
    instead of p, so that their mass stays in p. Where nothing is left of p, p becomes uniform.
    """

    def __init__(
        self, num_codes: int, static: bool, relaxation: Relaxation | None = None, reference: bool = False
    ) -> None:
        """static: true if drafts are samples of q, on a separate stream; false if they are its top codes."""
        self.noise = Noise(num_codes, silent=not static, stream=DRAFT)
        self._residual_noise = Noise(num_codes, silent=False, stream=RESIDUAL)
        self.relaxation, self.reference = relaxation, reference

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return (log_p + self._residual_noise.gumbel(seeds, positions[:, None])[:, 0]).argmax(dim=-1)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        chances = uniform(seeds, positions[:, None], tree.nodes, ACCEPT)[:, 0].float()
        hit, residual = self.judge(tree, log_p.exp(), chances)
        noise = self._residual_noise.gumbel(seeds, positions[:, None])
        return verdict_from_hits(tree, hit, (residual.log() + noise).argmax(dim=-1))

    def judge(self, tree: DraftTree, p: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the accepted nodes [B, N] and the distribution [B, N, V] left at each node after its
        children were judged.

        p [B, N, V]: the target's distribution after each node. chances [B, N]: one uniform per node.
        """
        hit = torch.zeros_like(tree.valid)
        hit[:, 0] = True
        residual, q = p, tree.q
        done = torch.zeros_like(tree.valid)  # nodes that have an accepted child
        for child, exists in children(tree):
            code = tree.codes.gather(1, child)[..., None]
            mass, merged = self._credit(residual, code[..., 0])
            chance = residual.gather(-1, code)[..., 0] + mass
            taken = q
            if q is not None:
                q_of_code = q.gather(-1, code)[..., 0]
                # q(x) is 0 only where _exclude() has set all of q to 0. Every child is skipped there,
                # whatever its code, so that no code is favoured.
                exists = exists & (q_of_code > 0)
                chance = chance / q_of_code.clamp_min(TINY)
                chance, taken = self._weigh(tree, child, residual, q, chance)
            accepted = exists & ~done & (chances.gather(1, child) <= chance)
            hit |= torch.zeros_like(hit).scatter(1, child, accepted)
            done |= accepted
            rejected = (exists & ~done)[..., None]
            left = self._take(residual, taken, code, merged)
            residual = torch.where(rejected, self._renormalise(left, p), residual)
            if q is not None:
                q = torch.where(rejected, self._exclude(q, code), q)
        return hit, residual

    def _credit(self, p: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """Returns S_j* [B, N] and a mask [B, N, V] of the neighbours merged into x, whose mass a rejection
        removes too."""
        merged = torch.zeros_like(p, dtype=torch.bool)
        if self.relaxation is None:
            return torch.zeros_like(p[..., 0]), merged
        near, admissible, mass = self.relaxation.aggregate(p, code)
        if self.reference:  # the released code takes k + 1 neighbours as soon as one is admissible
            near = self.relaxation.table[code][..., : self.relaxation.k + 1]
            admissible = admissible[..., :1].expand_as(near)
        return mass, merged.scatter(-1, near, admissible)

    def _weigh(
        self, tree: DraftTree, child: Tensor, p: Tensor, q: Tensor, chance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the chance [B, N] of each child [B, N] and what its rejection takes from p, [B, N, V], for
        a rule that changes them by the depths of the children."""
        return chance, q

    def _take(self, p: Tensor, q: Tensor | None, code: Tensor, merged: Tensor) -> Tensor:
        """Returns p [B, N, V], unnormalised, after x = code [B, N, 1] was rejected."""
        if q is None:
            return p.scatter(-1, code, 0.0).masked_fill(merged, 0.0)
        if self.reference:  # the released code spares the neighbours in q, so that they keep their mass in p
            return (p - q.masked_fill(merged, 0.0)).clamp_min(0.0)
        return (p - q).clamp_min(0.0).masked_fill(merged, 0.0)

    def _exclude(self, q: Tensor, code: Tensor) -> Tensor:
        """Returns q [B, N, V] without x = code [B, N, 1], normalised: the distribution of the next sample
        without replacement.

        It is all zero where fp32 no longer represents the proportions of the rest; such samples are skipped.
        """
        without = q.scatter(-1, code, 0.0)
        total = without.sum(-1, keepdim=True)
        return torch.where(total > MIN_MASS, without / total.clamp_min(MIN_MASS), 0.0)

    def _renormalise(self, left: Tensor, p: Tensor) -> Tensor:
        """Returns left / sum(left); where nothing is left, p (in the released code: uniform)."""
        total = left.sum(dim=-1, keepdim=True)
        empty = torch.full_like(p, 1 / p.shape[-1]) if self.reference else p
        return torch.where(total > 0, left / total.clamp_min(TINY), empty)


def children(tree: DraftTree) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (child [B, N] int64, exists [B, N] bool) for the first, second, ... child of every node, in node
    order. Where a node has no such child, child is 0 and exists is false."""
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & tree.valid[:, None, :]
    same[:, :, 0] = False  # the root is its own parent in the arrays, but a child of no node
    rank = (same & torch.ones_like(same[0]).tril(-1)).sum(dim=2).masked_fill(~tree.valid, tree.nodes)
    rank[:, 0] = tree.nodes
    number = torch.arange(tree.nodes, device=rank.device).expand_as(rank)
    for place in range(tree.width):
        child = torch.zeros_like(rank).scatter_reduce(1, tree.parents, number * (rank == place), "amax")
        yield child, child > 0
