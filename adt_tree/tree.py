"""Draft trees as arrays: shapes, ancestor masks, static topologies, the selection step of EAGLE-2.

All trees of a batch are one set of tensors, so that no step loops over images or nodes. Node 0 is the root:
the last committed code, which the target has not read yet. Parents come before their children. Trees of
fewer than N nodes are padded with invalid leaves. Example, a tree of five nodes:

    0 -- 1 -- 3        parents    0 0 0 1 1
    |    |             depths     0 1 1 2 2
    |    +--- 4        ancestors of node 4: 0, 1 and 4 itself, so row 4 of the mask is 1 1 0 0 1
    +--- 2

Dimensions: B images, N nodes (the root included), P pool candidates, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.policy import SMALLEST, TreeShape
from adt_tree.static_trees import Paths


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Returns numbers, or nested sequences of them, as an int64 tensor on the device, without waiting for it.

    A copy from ordinary memory to a CUDA device blocks the host until all queued kernels have run. A copy
    from pinned memory is queued behind them, and the host goes on.
    """
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The tree shapes of all images in flight: their bounds on the host, the shapes on the device.

    The bounds are at least 1. Where a tree has no room for a node, its limits are 0, and its nodes are
    padding.
    """

    depth: int  # upper bound on the depths of the trees
    width: int  # upper bound on their widths
    budget: int  # upper bound on their budgets
    levels: int  # number of levels to draft: the depth of the deepest tree
    limits: Tensor  # [B, 3] int64: depth, width and budget of each image's tree

    @staticmethod
    def of(shapes: Sequence[TreeShape], device: torch.device, at_least: TreeShape = SMALLEST) -> BatchShapes:
        """Returns one shape per image with their bounds, which are at least those of at_least. If at_least is
        the largest shape of a policy, all steps have the same bounds."""
        limits = [(shape.depth, shape.width, shape.budget) for shape in shapes]
        depth, width, budget = map(max, zip(*limits, strict=True))
        return BatchShapes(
            depth=max(depth, at_least.depth),
            width=max(width, at_least.width),
            budget=max(budget, at_least.budget),
            levels=max(1, *(shape.levels for shape in shapes)),
            limits=to_device(limits, device),
        )

    @property
    def all_levels(self) -> BatchShapes:
        """These shapes with `levels` raised to the bound on depth. For proposers that draft further levels at
        no cost: fewer different values of `levels` mean fewer graphs to record."""
        return replace(self, levels=self.depth)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One tree per image, padded to N nodes."""

    codes: Tensor  # [B, N] int64, codebook ids; codes[:, 0] is the root
    parents: Tensor  # [B, N] int64, parents[:, 0] = 0
    depths: Tensor  # [B, N] int64, depths[:, 0] = 0
    ancestors: Tensor  # [B, N, N] bool: ancestors[b, n, m] if node m is n itself or an ancestor of n
    valid: Tensor  # [B, N] bool: false for padding, and for drafts that no rule may accept
    depth: int  # upper bound on depths, known to the host
    width: int  # upper bound on the number of children of a node, known to the host
    q: Tensor | None = None  # [B, N, V]: a node's children were sampled from it; None: they were not sampled
    confidence: Tensor | None = None  # [B, N]: the drafter's log-confidence in the path down to each node
    leafy_chain: bool = False  # a chain 0, 1, 2, ... and leaves that hang from it: leafy_chain_mask()

    @property
    def nodes(self) -> int:
        """The number of nodes N, padding included."""
        return self.codes.shape[1]

    @property
    def longest(self) -> int:
        """The upper bound A on the number of nodes of a path, the root included."""
        return min(self.depth + 1, self.nodes)


def rows_at(values: Tensor, index: Tensor) -> Tensor:
    """Returns values[b, index[b, n]], [B, N, ...], from values [B, M, ...] and index [B, N]. It copies whole
    rows, which is faster than gather(), which copies number by number."""
    images, size = values.shape[:2]
    starts = torch.arange(0, images * size, size, device=index.device)[:, None]
    rows = values.flatten(0, 1).index_select(0, (starts + index).flatten())
    return rows.view(*index.shape, *values.shape[2:])


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """Returns the ancestors [B, N, N] bool of trees with these parents [B, N]: row n marks node n and its
    ancestors. depth: an upper bound on the depths."""
    nodes = parents.shape[1]
    number = torch.arange(nodes, device=parents.device)
    # A matrix that marks all nodes up to k steps above marks, squared, those up to 2 k steps above.
    above = ((number == parents[..., None]) | (number == number[:, None])).float()
    for _ in range(max(depth - 1, 0).bit_length()):
        above = (above @ above).clamp(max=1)
    return above > 0


def leafy_chain_mask(parents: Tensor) -> Tensor:
    """Returns ancestor_mask() of a chain with leaves, without its products of matrices: nodes 0, 1, 2, ...
    are a chain, so the ancestors of a node are its parent and all nodes of lower numbers than its parent.

    0 -- 1 -- 2        parents 0 0 1 0 1
    |    |             For example, the ancestors of node 4 are its parent 1, and 0.
    3    4
    """
    number = torch.arange(parents.shape[1], device=parents.device)
    return (number <= parents[..., None]) | torch.eye(len(number), dtype=torch.bool, device=parents.device)


def root_only_tree(codes: Tensor) -> DraftTree:
    """Returns trees that consist of the root, codes [B]: the input of the target in the AR baseline."""
    zero = torch.zeros_like(codes)[:, None]
    true = torch.ones_like(zero, dtype=torch.bool)
    return DraftTree(codes[:, None], zero, zero, true[..., None], true, depth=0, width=0)


@dataclass(frozen=True, slots=True)
class Pool:
    """Candidates for the nodes of a tree. Parents come before their children and score no less than they."""

    codes: Tensor  # [B, P] int64
    scores: Tensor  # [B, P]; -inf where an image has no candidate
    parents: Tensor  # [B, P] int64 pool indices; -1 is the root
    depths: Tensor  # [P] int64


def select(pool: Pool, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
    """Returns trees of the best `budget` candidates of every image's pool, below the roots last_codes [B]:
    the re-ranking of EAGLE-2.

    A parent scores no less than its children and comes before them, and ties keep the order of the pool. So
    the parent of a chosen candidate is always chosen too.
    """
    images, size = pool.scores.shape
    max_drafted = min(shapes.budget, size)
    order = pool.scores.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(max_drafted, device=last_codes.device)
    usable = (rank < shapes.limits[:, 2:]) & order.values[:, :max_drafted].isfinite()
    # Pool indices in pool order, padded with `size` at the end.
    chosen = order.indices[:, :max_drafted].masked_fill(~usable, size).sort(dim=1).values
    valid = chosen < size
    index = chosen.clamp(max=size - 1)
    # Column i + 1 holds the node that pool entry i becomes. Column 0 belongs to the root, which is parent -1;
    # the last column receives the padding. If entries 0 and 2 of 4 are chosen, they become nodes 1 and 2, and
    # the row reads 0 1 0 2 0, followed by the padding. A parent of 0 then means column 1, which is node 1.
    node_of = pool.scores.new_zeros((images, size + 2), dtype=torch.int64)
    node_of.scatter_(1, chosen + 1, (rank + 1).expand(images, -1))
    above = node_of.gather(1, pool.parents.gather(1, index) + 1).masked_fill(~valid, 0)
    zero = torch.zeros_like(last_codes)[:, None]
    parents = torch.cat((zero, above), dim=1)
    return DraftTree(
        codes=torch.cat((last_codes[:, None], pool.codes.gather(1, index).masked_fill(~valid, 0)), dim=1),
        parents=parents,
        depths=torch.cat((zero, pool.depths[index].masked_fill(~valid, 1)), dim=1),
        ancestors=ancestor_mask(parents, shapes.depth),
        valid=torch.cat((torch.ones_like(zero, dtype=torch.bool), valid), dim=1),
        depth=shapes.depth,
        width=shapes.width,
        confidence=torch.cat((zero.float(), pool.scores.gather(1, index)), dim=1),
    )


class Topology:
    """The nodes of a static tree, or of any tree that is given by its paths.

    A node is named by its path of ranks: [0, 2] is the third child of the root's first child. Nodes are
    numbered by depth, then by path. row_order[n] is the place of node n in the order by path alone, in which
    the released code tries its candidates.
    """

    def __init__(self, paths: Paths) -> None:
        """Numbers the nodes. No path occurs twice, and the parent of every node is among them."""
        nodes = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        index = {(): 0} | {path: number for number, path in enumerate(nodes, start=1)}
        self.parents = [0] + [index[path[:-1]] for path in nodes]
        self.ranks = [0] + [path[-1] for path in nodes]
        self.depths = [0] + [len(path) for path in nodes]
        self.depth = max(self.depths)
        self.width = 1 + max(self.ranks)
        inner = set(self.parents)
        # levels[d]: the nodes at depth d that have children, in node order. The drafter expands these.
        self.levels = [[n for n in sorted(inner) if self.depths[n] == d] for d in range(self.depth)]
        by_path = sorted(index)
        self.row_order = [by_path.index(path) for path in index]

    def ancestors(self) -> Tensor:
        """Returns the ancestor mask [N, N] bool."""
        return ancestor_mask(torch.tensor([self.parents]), self.depth)[0]
