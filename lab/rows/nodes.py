"""The nodes of a pass that continues several rows of every image: their order, and what each may see.

The trees of an image's A heads, of M nodes each, lie one after the other. Most of these A * M nodes are
empty, because trees have different sizes, so a pass takes the N others.

The target's cache is addressed by position: the keys of the cell at position i lie in entry i behind the
prompt, and those of the pass in the N entries after the last position. So cells are committed in any order.

Dimensions: B images, A heads, M nodes of a head, N nodes of a pass, L nodes of a path, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.tree import DraftTree, rows_at, to_device
from adt_tree.verify import Verdict
from lab.rows.schedule import Head


@dataclass(frozen=True, slots=True)
class Plan:
    """The heads of a pass, on the device. A head without a row has no node."""

    position: Tensor  # [B, A] of the root
    source: Tensor  # [B, A] position of the cell whose code the root has
    known: Tensor  # [B, A] bool: the root is a committed cell
    open: Tensor  # [B, A] bool: the row may commit cells
    nodes: Tensor  # [B, A] number of nodes, the root included
    first: Tensor  # [B * A] position of the first code below every root

    @classmethod
    def of(cls, numbers: Tensor) -> Plan:
        """Returns the plan of numbers_of()."""
        position, source, known, open_, nodes = numbers.unbind(dim=2)
        return cls(position, source, known > 0, open_ > 0, nodes, position.flatten() + 1)


def numbers_of(
    heads: Sequence[Sequence[Head | None]], nodes: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Returns the numbers of a Plan on the device, [B, A, 5], by one transfer. heads, nodes: [B][A]."""
    values = [
        [
            (h.position, h.source, h.known, h.room > 0, n) if h else (0, 0, 0, 0, n)
            for h, n in zip(*pair, strict=True)
        ]
        for pair in zip(heads, nodes, strict=True)
    ]
    return to_device(values, device)


def visible(cells: Tensor, positions: Tensor, roots: Tensor, committed: Tensor, own: Tensor) -> Tensor:
    """Returns what each of F nodes attends to, [B, F, P + F] bool: cells in the cache, and nodes of the pass.

    A node sees all committed cells of the rows above it and of its own row, and the drafts before it in its
    own row, but no draft of another row (PJD, 2606.05703). Nothing sees a cell that is not committed.

    cells [B, P] bool: those in the cache. positions [B, F]: of the nodes. roots [B, F]: positions of the
    roots of their trees. committed [B, F] bool: true for committed cells. own [B, F, F] bool: node f attends
    to node g of its tree.
    """
    number = torch.arange(cells.shape[1], device=cells.device)
    cached = cells[:, None] & (number < roots[..., None])
    others = committed[:, None] & (positions[:, None] < roots[..., None])
    return torch.cat((cached, own | others), dim=2)


def own_nodes(tree: DraftTree, known: Tensor) -> Tensor:
    """Returns the ancestors of the nodes of all heads, [B, A * M, A * M] bool. A root that is a stand-in
    (known [B, A] is false) is seen by itself alone, because the true cell will replace it."""
    (images, heads), nodes = known.shape, tree.nodes
    ancestors = tree.ancestors.reshape(images, heads, nodes, nodes).clone()
    ancestors[:, :, 1:, 0] &= known[..., None]
    same_head = torch.eye(heads, dtype=torch.bool, device=known.device)[:, None, :, None]
    return (ancestors[:, :, :, None] & same_head).reshape(images, heads * nodes, heads * nodes)


@dataclass(frozen=True, slots=True)
class PassNodes:
    """The N nodes of a pass."""

    codes: Tensor  # [B, N]
    positions: Tensor  # [B, N]
    visible: Tensor  # [B, N, P + N] bool: the cells in the cache and the nodes that each node attends to
    place: Tensor  # [B, A * M] the number of every head's nodes among the N; N for empty ones

    @classmethod
    def of(cls, plan: Plan, tree: DraftTree, cells: Tensor, size: int) -> PassNodes:
        """Returns the nodes of a pass. tree: of all heads, [B * A, M]. cells [B, P] bool: those in the
        cache. size: N, at least the number of nodes of every image."""
        images, device = len(cells), cells.device
        number = torch.arange(tree.nodes, device=device)
        depths = tree.depths.view(images, -1, tree.nodes)
        roots = plan.position[..., None].expand_as(depths)
        positions, roots = (roots + depths).flatten(1), roots.flatten(1)
        present = (number < plan.nodes[..., None]).flatten(1)
        committed = ((number == 0) & plan.known[..., None]).flatten(1)
        place = (present.cumsum(dim=1) - 1).masked_fill(~present, size)
        # The N nodes among the A * M. Padding is another node 0, which no node sees and nothing reads.
        every = torch.arange(place.shape[1], device=device).expand(images, -1)
        take = torch.zeros(images, size + 1, dtype=torch.int64, device=device)
        take = take.scatter_(1, place, every)[:, :size]
        seen = rows_at(visible(cells, positions, roots, committed, own_nodes(tree, plan.known)), take)
        filled = torch.arange(size, device=device) < present.sum(dim=1, keepdim=True)
        among = seen[..., cells.shape[1] :].gather(2, take[:, None].expand(-1, size, -1)) & filled[:, None]
        among = among | torch.eye(size, dtype=torch.bool, device=device)
        codes, positions = (x.gather(1, take) for x in (tree.codes.view(images, -1), positions))
        return cls(codes, positions, torch.cat((seen[..., : cells.shape[1]], among), dim=2), place)

    def by_head(self, x: Tensor, nodes: int) -> Tensor:
        """Returns x [B, N, ...] in the order of the heads, [B * A, M, ...], with M = nodes. Its values at
        empty nodes are arbitrary."""
        return rows_at(x, self.place.clamp(max=x.shape[1] - 1)).view(-1, nodes, *x.shape[2:])

    def moves(self, plan: Plan, verdict: Verdict, outside: int) -> tuple[Tensor, Tensor]:
        """Returns the entries of the cache that hold the accepted paths, and the positions of their cells,
        both [B, A * L] and counted from the end of the prompt.

        Stand-ins and heads without a row are left out: they move the entry `outside` = P, that of the first
        node, to itself.
        """
        images, heads = plan.position.shape
        path, count = (x.view(images, heads, -1) for x in (verdict.path, verdict.count))
        level = torch.arange(path.shape[2], device=path.device)
        kept = (level < count) & ((level > 0) | plan.known[..., None]) & (plan.nodes[..., None] > 0)
        first = torch.arange(0, self.place.shape[1], self.place.shape[1] // heads, device=path.device)
        entries = outside + self.place.gather(1, torch.where(kept, first[:, None] + path, 0).flatten(1))
        positions = (plan.position[..., None] + level).flatten(1)
        left_out = ~kept.flatten(1)
        return entries.masked_fill(left_out, outside), positions.masked_fill(left_out, outside)
