"""Draft trees as arrays: shapes, ancestor masks, static topologies, the selection step of EAGLE-2.

All trees of a batch are one set of tensors, so that no step loops over images or nodes. Node 0 is the root:
the last committed code, not yet seen by the target. Parents precede children. Rows shorter than N are padded
with invalid leaves. Dimensions: B images, N nodes (root included), P pool candidates, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.static_trees import Paths

IDLE = TreeShape(0, 0, 0)  # of a slot without an image


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Numbers the host knows -> an int64 tensor on the device, without waiting for it.

    From ordinary memory the copy to a CUDA device would wait for all that is queued there; from pinned memory
    it takes its turn behind it, and the host goes on.
    """
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The tree shapes of all images in flight: bounds on the host, each image's own shape on the device."""

    depth: int  # no image's is greater
    width: int
    budget: int
    levels: int  # that have to be drafted: the depth of the deepest tree
    limits: Tensor  # [B, 3] int64: each image's depth, width and budget

    @staticmethod
    def of(shapes: Sequence[TreeShape], device: torch.device, at_least: TreeShape = IDLE) -> BatchShapes:
        """Returns the bounds of one shape per image. They are not below those of at_least: if that is the
        largest shape there can be, all steps have the same bounds."""
        limits = [(shape.depth, shape.width, shape.budget) for shape in shapes]
        depth, width, budget = map(max, zip(*limits, strict=True))
        return BatchShapes(
            depth=max(depth, at_least.depth),
            width=max(width, at_least.width),
            budget=max(budget, at_least.budget),
            levels=depth if min(width, budget) else 0,
            limits=to_device(limits, device),
        )

    @property
    def empty(self) -> bool:
        """Whether no image drafts anything."""
        return self.levels == 0

    @property
    def all_levels(self) -> BatchShapes:
        """The same for a proposer to which a level more costs nothing."""
        return self if self.empty else replace(self, levels=self.depth)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One tree an image, padded to N nodes."""

    codes: Tensor  # [B, N] int64, codebook ids; codes[:, 0] is the root
    parents: Tensor  # [B, N] int64, parents[:, 0] = 0
    depths: Tensor  # [B, N] int64
    ancestors: Tensor  # [B, N, N] bool: ancestors[b, n, m] where m is n or above n
    valid: Tensor  # [B, N] bool
    depth: int  # bound on depths known to the host
    width: int  # bound on the children of one node known to the host
    q: Tensor | None = None  # [B, N, V] what a node's children were drawn from; None: deterministic drafts
    confidence: Tensor | None = None  # [B, N] the drafter's log-confidence in the path down to each node
    leafy_chain: bool = False  # nodes 0, 1, 2, ... are a chain, all others leaves that hang from it

    @property
    def nodes(self) -> int:
        """N, padding included."""
        return self.codes.shape[1]

    @property
    def longest(self) -> int:
        """A, a bound on the nodes of a path, the root included."""
        return min(self.depth + 1, self.nodes)


def rows_at(values: Tensor, index: Tensor) -> Tensor:
    """values [B, M, ...] at index [B, N]: [B, N, ...]. Whole rows are copied, which gather() does number by
    number."""
    images, size = values.shape[:2]
    starts = torch.arange(0, images * size, size, device=index.device)[:, None]
    rows = values.flatten(0, 1).index_select(0, (starts + index).flatten())
    return rows.view(*index.shape, *values.shape[2:])


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """[B, N, N] bool from parents [B, N]: row n marks n itself and everything above it; depth bounds the
    tree."""
    nodes = parents.shape[1]
    eye = torch.eye(nodes, device=parents.device)
    above = (eye + torch.nn.functional.one_hot(parents, nodes)).clamp(max=1)
    for _ in range(max(depth - 1, 0).bit_length()):  # squaring covers 1, 2, 4, ... steps up
        above = (above @ above).clamp(max=1)
    return above > 0


def leafy_chain_mask(parents: Tensor) -> Tensor:
    """ancestor_mask() of a chain in node order that leaves hang from: above a node is its parent and all
    before it."""
    number = torch.arange(parents.shape[1], device=parents.device)
    return (number <= parents[..., None]) | torch.eye(len(number), dtype=torch.bool, device=parents.device)


def root_only_tree(codes: Tensor) -> DraftTree:
    """Trees of the root alone, codes [B]: what the AR baseline feeds the target."""
    zero = torch.zeros_like(codes)[:, None]
    true = torch.ones_like(zero, dtype=torch.bool)
    return DraftTree(codes[:, None], zero, zero, true[..., None], true, depth=0, width=0)


@dataclass(frozen=True, slots=True)
class Pool:
    """Candidates for a tree. Parents come before children, and no child scores more than its parent."""

    codes: Tensor  # [B, P] int64
    scores: Tensor  # [B, P]; -inf: not a candidate
    parents: Tensor  # [B, P] int64 pool indices, -1 the root
    depths: Tensor  # [P]

    @staticmethod
    def join(pools: Sequence[Pool]) -> Pool:
        """One pool after the other; parents index the whole."""
        return Pool(
            torch.cat([p.codes for p in pools], dim=1),
            torch.cat([p.scores for p in pools], dim=1),
            torch.cat([p.parents for p in pools], dim=1),
            torch.cat([p.depths for p in pools]),
        )


def select(pool: Pool, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
    """Keep the best `budget` candidates of every image's pool as a tree below last_codes [B] (EAGLE-2,
    re-ranking). Ties keep pool order, so the kept set is closed under parents."""
    images, size = pool.scores.shape
    kept = min(shapes.budget, size)
    order = pool.scores.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(kept, device=last_codes.device)
    usable = (rank < shapes.limits[:, 2:]) & order.values[:, :kept].isfinite()
    chosen = order.indices[:, :kept].masked_fill(~usable, size).sort(dim=1).values
    valid = chosen < size
    index = chosen.clamp(max=size - 1)
    # Which node a pool entry became: column 0 is the root's, the last one takes padding.
    node_of = pool.scores.new_zeros((images, size + 2), dtype=torch.int64)
    node_of.scatter_(1, chosen + 1, (rank + 1).expand(images, -1))
    above = node_of.gather(1, pool.parents.gather(1, index) + 1).masked_fill(~valid, 0)
    first = torch.zeros_like(last_codes)[:, None]
    parents = torch.cat((first, above), dim=1)
    return DraftTree(
        codes=torch.cat((last_codes[:, None], pool.codes.gather(1, index).masked_fill(~valid, 0)), dim=1),
        parents=parents,
        depths=torch.cat((first, pool.depths[index].masked_fill(~valid, 1)), dim=1),
        ancestors=ancestor_mask(parents, shapes.depth),
        valid=torch.cat((torch.ones_like(first, dtype=torch.bool), valid), dim=1),
        depth=shapes.depth,
        width=shapes.width,
        confidence=torch.cat((first.float(), pool.scores.gather(1, index)), dim=1),
    )


class StaticTree:
    """A fixed topology: nodes sorted by (depth, path), and what each drafting level expands (EAGLE-1).

    row_order: each node's rank by its path alone, the order of the released code's candidate rows.
    """

    def __init__(self, paths: Paths) -> None:
        """Index the tree; ValueError if a node's parent is missing or a path stands twice."""
        nodes = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        index = {(): 0} | {path: number for number, path in enumerate(nodes, start=1)}
        if len(index) != len(nodes) + 1:
            raise ValueError("static tree: a path stands twice")
        for path in nodes:
            if path[:-1] not in index:
                raise ValueError(f"static tree: node {list(path)} has no parent {list(path[:-1])}")
        self.parents = [0] + [index[path[:-1]] for path in nodes]
        self.ranks = [0] + [path[-1] for path in nodes]
        self.depths = [0] + [len(path) for path in nodes]
        self.depth = max(self.depths)
        self.width = 1 + max(self.ranks)
        inner = set(self.parents)
        # levels[d]: the nodes at depth d that have children, in node order
        self.levels = [[n for n in sorted(inner) if self.depths[n] == d] for d in range(self.depth)]
        by_path = sorted(index)
        self.row_order = [by_path.index(path) for path in index]

    @property
    def largest(self) -> TreeShape:
        """The one shape it has."""
        return TreeShape(self.depth, self.width, len(self.parents) - 1)

    def ancestors(self) -> Tensor:
        """[N, N] bool."""
        return ancestor_mask(torch.tensor([self.parents]), self.depth)[0]
