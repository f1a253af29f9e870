"""Rules of sampled static trees, computed exactly for given drafts: recursive rejection and traversal.

What is random in either rule, once a tree is drafted, is a sequence of yes or no; the chances depend on the
tree and its laws alone. Dimensions: B trees of one topology, N nodes, I inner nodes, V codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.tree import StaticTree, chain
from adt_tree.verify import LEAST

End = tuple[int, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Trees whose nodes' children were drawn without replacement from q, in node order."""

    tree: StaticTree
    codes: Tensor  # [B, N] int64
    valid: Tensor  # [B, N] bool
    p: Tensor  # [B, I, V] fp64 at the inner nodes, in node order
    q: Tensor  # [B, I, V] fp64

    @property
    def inner(self) -> list[int]:
        """Nodes that have children."""
        return sorted(set(self.tree.parents))

    def children(self, node: int) -> list[int]:
        """In the order in which they were drawn."""
        return [child for child in range(1, len(self.tree.parents)) if self.tree.parents[child] == node]

    def laws(self, node: int) -> tuple[Tensor, Tensor]:
        """p and q [B, V] at an inner node."""
        index = self.inner.index(node)
        return self.p[:, index], self.q[:, index]

    def first_path(self) -> Sampled:
        """The first draws alone: a chain, each code drawn from q."""
        nodes = [0]
        while below := self.children(nodes[-1]):
            nodes.append(below[0])
        above = [self.inner.index(node) for node in nodes[:-1]]
        stem = StaticTree(chain(len(nodes) - 1))
        return Sampled(stem, self.codes[:, nodes], self.valid[:, nodes], self.p[:, above], self.q[:, above])


def rejection(drafts: Sampled) -> Iterator[End]:
    """Recursive rejection (RRSw, 2402.14160), the rule of verify.Rejection: yields (node, chance [B] that the
    path ends there, law [B, V] of the code after it; None at leaves: p there)."""
    reach = {0: torch.ones_like(drafts.p[:, 0, 0])}
    for node in range(len(drafts.tree.parents)):
        left, below = reach[node], drafts.children(node)
        if not below:
            yield node, left, None
            continue
        p, q = own, _ = drafts.laws(node)
        for child in below:
            code, there = _draw(drafts, child, q)
            chance = _ratio(p, q, code).clamp(max=1) * there
            reach[child], left = left * chance, left * (1 - chance)
            rest = (p - q).clamp_min(0)
            total = rest.sum(dim=1, keepdim=True)
            p = torch.where(there[:, None], torch.where(total > 0, rest / total, own), p)
            q = torch.where(there[:, None], _without(q, code), q)
        yield node, left, p


def traversal(drafts: Sampled) -> Iterator[End]:
    """Traversal verification (2505.12398), which on a chain is block verification (2403.10444): as rejection.

    A node's weight w starts at min(1, w p(x) / q(x)) of its parent's; leaves are tried first, and a node ends
    the path with its weight once all below it were refused. After a child was refused, with S the mass of
    max(w p - q, 0): w <- S / (S + 1 - w), p <- norm(max(w p - q, 0)), q <- norm(q without x).
    """
    yield from _traverse(drafts, 0, torch.ones_like(drafts.p[:, 0, 0]), torch.ones_like(drafts.p[:, 0, 0]))


def _traverse(drafts: Sampled, node: int, weight: Tensor, alive: Tensor) -> Iterator[End]:
    """The ends at a node and below, children first; alive [B]: chance that the traversal comes here."""
    below, p = drafts.children(node), None
    if below:
        p, q = drafts.laws(node)
        for child in below:
            code, there = _draw(drafts, child, q)
            passed = capped(weight * _ratio(p, q, code)) * there
            for end in _traverse(drafts, child, passed, alive):
                alive = alive - end[1]
                yield end
            rest = (weight[:, None] * p - q).clamp_min(0)
            total = rest.sum(dim=1)
            bottom = total + (1 - weight)
            shrunk = torch.where(bottom > 0, total / bottom, weight)
            p = torch.where((there & (total > 0))[:, None], rest / total[:, None], p)
            weight = torch.where(there, shrunk, weight)
            q = torch.where(there[:, None], _without(q, code), q)
    yield node, alive * weight, p


def capped(weight: Tensor) -> Tensor:
    """A weight is a probability."""
    return weight.clamp(max=1)


def accepted(drafts: Sampled, ends: Iterator[End]) -> Tensor:
    """Expected accepted draft codes [B] of a rule's ends."""
    return sum((drafts.tree.depths[node] * chance for node, chance, _ in ends), torch.zeros(()).double())


def _draw(drafts: Sampled, child: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """A child's code [B, 1], and whether it was drawn: q [B, V] must hold mass for it."""
    code = drafts.codes[:, child, None]
    return code, drafts.valid[:, child] & (q.gather(1, code)[:, 0] > 0)


def _ratio(p: Tensor, q: Tensor, code: Tensor) -> Tensor:
    drawn = q.gather(1, code)[:, 0]
    return p.gather(1, code)[:, 0] / drawn.masked_fill(drawn == 0, 1)


def _without(q: Tensor, code: Tensor) -> Tensor:
    """q [B, V] without code [B, 1], renormalised; zero where nothing that could be told from rounding is
    left."""
    rest = q.scatter(1, code, 0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > LEAST, rest / total.clamp_min(LEAST), 0)
