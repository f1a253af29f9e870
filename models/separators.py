"""A target whose model ends every row of the image with a separator token (Lumina-mGPT), and its drafter.

The method sees codes alone. Separators are forced: they are no choices, cost no sampling and no level of a
tree. Behind every node in the last column the pass carries one more row, the separator, as that node's only
child; what follows the node hangs below the separator, and the distribution after the node is read there.

Dimensions: G guidance branches, B slots, N nodes, K separators, M = N + K, A path nodes, W nodes of a level,
E nodes expanded so far, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.roles import Prefix, Scored
from adt_tree.tree import DraftTree, to_device
from adt_tree.verify import Verdict
from models.drafter import EagleDrafter
from models.target import ARTarget


def tokens_in(codes: int, width: int) -> int:
    """Tokens that the first `codes` codes take: a full row is followed by its separator."""
    return codes + codes // width


@dataclass(frozen=True, slots=True)
class Separated:
    """A tree with its separators behind it: rows [0, N) are its nodes, rows [N, M) separators."""

    codes: Tensor  # [B, M]
    depths: Tensor  # [B, M] tokens below the root
    ancestors: Tensor  # [B, M, M] bool
    last: Tensor  # [B, N] bool: nodes that a separator follows
    read: Tensor  # [B, N]: the row where the distribution after a node is read


def separate(tree: DraftTree, last: Tensor, most: int, separator: int) -> Separated:
    """Append a separator to the nodes that last [B, N] marks, of which no image has more than `most`."""
    pick = last.int().sort(dim=1, descending=True, stable=True).indices[:, :most]  # [B, K]
    real = last.gather(1, pick)
    nodes, count = tree.nodes, pick.shape[1]
    above = tree.ancestors.gather(2, pick[:, None].expand(-1, nodes, -1)) & real[:, None]
    number = torch.arange(nodes, device=pick.device)
    below = above & (number[:, None] != pick[:, None])  # [B, N, K]: node n lies below separator k
    own = pick[..., None]
    # Separators see what their node sees, the separators it lies below, and themselves.
    seen = tree.ancestors.gather(1, own.expand(-1, -1, nodes))
    eye = torch.eye(count, dtype=torch.bool, device=pick.device)
    earlier = below.gather(1, own.expand(-1, -1, count)) | eye
    rows = (torch.cat((tree.ancestors, below), dim=2), torch.cat((seen, earlier), dim=2))
    depths = tree.depths + below.sum(dim=2)
    at = torch.arange(nodes, nodes + count, device=pick.device)
    return Separated(
        codes=torch.cat((tree.codes, torch.full_like(pick, separator)), dim=1),
        depths=torch.cat((depths, depths.gather(1, pick) + 1), dim=1),
        ancestors=torch.cat(rows, dim=1),
        last=last,
        read=number.expand_as(last).scatter(1, pick, torch.where(real, at, pick)),
    )


def kept_first(keep: Tensor) -> Tensor:
    """Indices [B, 2A] that bring the entries kept of [B, A, 2] to the front, in order."""
    return (~keep.flatten(1)).int().sort(dim=1, stable=True).indices


class SeparatorTarget:
    """The Target of codes over a target of tokens.

    Features [.., 2D] of a node: those of its own row, then those of the row where the distribution after it
    is read, which differ in the last column. Drafters that know of separators need both.
    """

    def __init__(self, tokens: ARTarget, grid: Grid, separator: int) -> None:
        """tokens: over rows of grid.width + 1, with room for trees twice as large. separator: token id."""
        assert tokens.grid == Grid(grid.height, grid.width + 1)
        self.tokens, self.grid = tokens, grid
        self.separator = separator - tokens.first_code  # outside the codebook
        self.num_codes, self.slots, self.device = tokens.num_codes, tokens.slots, tokens.device
        self.run, self.few_shapes = tokens.run, tokens.few_shapes
        self._separated: Separated | None = None  # the trees scored last; None: they had no separators

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """Forget the slot's image and commit the prompt."""
        prefix = self.tokens.prefill(slot, prompt)
        return Prefix(prefix.logits, [torch.cat((branch, branch), dim=-1) for branch in prefix.features])

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """Score every node, behind its separator where it has one."""
        most = self._most_separators(tree, committed)
        rows = self.tokens.rows(tree.nodes + most)
        bound = self.tokens.bound(tokens_in(max(committed), self.grid.width))
        if most == 0:
            self._separated = None
            return self.run(self._score_nodes, tree.codes, tree.depths, tree.ancestors, bound, rows)
        roots = to_device(committed, self.device)
        scored, self._separated = self.run(self._score_separated, tree, roots, bound, rows)
        return scored

    def _score_nodes(self, codes: Tensor, depths: Tensor, ancestors: Tensor, bound: int, rows: int) -> Scored:
        """A pass over trees without separators."""
        scored = self.tokens.score(codes, depths, ancestors, bound, rows)
        return Scored(scored.logits, torch.cat((scored.features, scored.features), dim=-1))

    def _score_separated(
        self, tree: DraftTree, roots: Tensor, bound: int, rows: int
    ) -> tuple[Scored, Separated]:
        """A pass over trees with as many separators as it has rows for; roots [B]: their indices."""
        column = (roots[:, None] + tree.depths) % self.grid.width
        last = (column == self.grid.width - 1) & tree.valid
        separated = separate(tree, last, rows - tree.nodes, self.separator)
        codes, depths, ancestors = separated.codes, separated.depths, separated.ancestors
        scored = self.tokens.score(codes, depths, ancestors, bound, rows)
        logits, read = (self._at(x, separated.read) for x in (scored.logits, scored.features))
        features = torch.cat((scored.features[:, :, : tree.nodes], read), dim=-1)
        return Scored(logits, features), separated

    @staticmethod
    def _at(x: Tensor, rows: Tensor) -> Tensor:
        """x [G, B, M, ...] at rows [B, N]."""
        return x.gather(2, rows[None, ..., None].expand(x.shape[0], -1, -1, x.shape[-1]))

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        """Append the path with the separators on it."""
        if self._separated is None:
            self.tokens.commit(tree, verdict)
        else:
            self.run(self._commit_separated, self._separated.read, self._separated.last, verdict)

    def _commit_separated(self, read: Tensor, last: Tensor, verdict: Verdict) -> None:
        taken = torch.arange(verdict.path.shape[1], device=self.device) < verdict.count[:, None]
        pairs = torch.stack((verdict.path, read.gather(1, verdict.path)), dim=2)
        keep = torch.stack((taken, taken & last.gather(1, verdict.path)), dim=2)
        path = pairs.flatten(1).gather(1, kept_first(keep))
        self.tokens.commit_path(path, keep.flatten(1).sum(dim=1))

    def release(self, slot: int) -> None:
        """Forget an idle slot's prefix."""
        self.tokens.release(slot)

    def _most_separators(self, tree: DraftTree, committed: Sequence[int]) -> int:
        """A bound, known to the host, on the separators of any image's tree."""
        width = self.grid.width

        def separators(root: int) -> int:
            return sum(most_nodes(tree, d) for d in range((width - 1 - root) % width, tree.depth + 1, width))

        return min(tree.nodes, max(map(separators, committed)))


def most_nodes(tree: DraftTree, depth: int) -> int:
    """A bound, known to the host, on an image's nodes at this depth: each level above it has a node, and a
    node has at most tree.width children. In a leafy chain only one node of the level above has any."""
    return min(tree.width ** min(depth, 1 if tree.leafy_chain else depth), max(tree.nodes - depth, 0))


@dataclass(frozen=True, slots=True)
class _Block:
    """Entries of the drafter's scratch: one level's nodes, or the separators behind them."""

    of: slice | None  # the level's columns in `ancestors`; None: the root
    there: Tensor | None  # [B] bool: slots in which the separators exist; None: these are nodes


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the host knows of the roots of all images: equal contexts, equal passes of the drafter."""

    tokens: int  # bound on the tokens in any slot's prefix
    since: int  # the nearest root's distance behind the first column of a row but the first; width: none
    ends: frozenset[int]  # levels below the roots, modulo the width, that may lie in the last column


class SeparatorDrafter:
    """The Drafter of codes over a drafter of the whole token sequence; features are those of SeparatorTarget.

    A separator is an entry like any other: the pair (feature at the row's last code, separator) stands before
    the pair (feature at the separator, next code). Where a drafted level lies in the last column the network
    runs once more, over the separators behind it, and the next level grows from there; counts of drafter
    calls leave that out.
    """

    def __init__(self, tokens: EagleDrafter, target: SeparatorTarget, max_depth: int) -> None:
        """tokens: over target.tokens, with room for trees of twice max_depth and one level more."""
        self.tokens, self.target, self.device = tokens, target, tokens.device
        self._max_depth = max_depth
        self._row = tokens.net.config.hidden_size
        self._paired = torch.zeros(target.slots, dtype=torch.int64, device=self.device)  # [B] codes paired
        self._ends = frozenset[int]()  # as RowContext.ends, of the last extend()
        self._blocks: list[_Block] = []

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """Take in the prompt; it has no separators."""
        self._paired[slot] = 0
        own = [branch[:, : self._row] for branch in prefix.features]
        self.tokens.prefill(slot, prompt, Prefix(prefix.logits, own))

    def release(self, slot: int) -> None:
        """Forget an idle slot's entries."""
        self._paired[slot] = 0
        self.tokens.release(slot)

    def context(self, committed: Sequence[int]) -> RowContext:
        """Where the roots, whose indices are `committed`, lie in their rows. Where few shapes are fast,
        either all levels may end a row or none."""
        width = self.target.grid.width
        since = min((root % width for root in committed if root >= width), default=width)
        ends = frozenset(width - 1 - root % width for root in committed)
        if self.target.few_shapes:
            since = 0 if since <= self._max_depth else width
            ends = frozenset(range(width) if min(ends) <= self._max_depth else ())
        return RowContext(self.tokens.context([tokens_in(root, width) for root in committed]), since, ends)

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, context: RowContext
    ) -> tuple[Tensor, Tensor]:
        """Commit the pairs, separators among them; then read the one behind the root, if there is one."""
        width, pairs = self.target.grid.width, codes.shape[1]
        self._ends = context.ends
        own, read = features.split(self._row, dim=-1)
        order = torch.arange(pairs, device=self.device)
        index = self._paired[:, None] + order
        self._paired += count
        if context.since < pairs:
            new = order < count[:, None]
            keep = torch.stack((new & (index % width == 0) & (index > 0), new), dim=2)
            at = kept_first(keep)
            tokens = torch.stack((torch.full_like(codes, self.target.separator), codes), dim=2)
            both = torch.stack((own, read), dim=3).flatten(2, 3)
            read = both.gather(2, at[None, ..., None].expand_as(both))
            codes, count = tokens.flatten(1).gather(1, at), keep.flatten(1).sum(dim=1)
        logits, feature = self.tokens.extend(read, codes, count, context.tokens)
        self._blocks = []
        logits, feature = self._pass_separators(None, logits[:, :, None], feature[:, :, None], 0)
        return logits[:, :, 0], feature[:, :, 0]

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """A level of tree nodes, and the separators behind it in the last column."""
        own = slice(ancestors.shape[2] - codes.shape[1], ancestors.shape[2])
        self._blocks.append(_Block(own, None))
        seen, depths = self._seen(ancestors), self._depths(codes, depth)
        logits, features = self.tokens.expand_at(codes, features, seen, depths)
        return self._pass_separators(own, logits, features, depth + 1, ancestors)

    def _pass_separators(
        self,
        level: slice | None,
        logits: Tensor,
        features: Tensor,
        below: int,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of a level `below` the root; in the last column those behind its separators."""
        width, last = self.target.grid.width, self.target.grid.width - 1
        if below % width not in self._ends:
            return logits, features
        there = (self._paired - 1 + below) % width == last
        separators = torch.full(features.shape[1:3], self.target.separator, device=self.device)
        eye = torch.eye(separators.shape[1], dtype=torch.bool, device=self.device)
        seen = eye.expand(len(separators), -1, -1)
        if ancestors is not None:
            seen = torch.cat((self._seen(ancestors), seen), dim=2)
        depths = self._depths(separators, below)
        after, passed = self.tokens.expand_at(separators, features, seen, depths)
        self._blocks.append(_Block(level, there))
        choose = there[None, :, None, None]
        return torch.where(choose, after, logits), torch.where(choose, passed, features)

    def _seen(self, ancestors: Tensor) -> Tensor:
        """ancestors [B, W, E] over the scratch's entries, separators included: whoever sees a node and is not
        it sees its separator."""
        parts = []
        for block in self._blocks:
            part = ancestors[:, :, block.of] if block.of is not None else torch.ones_like(ancestors[:, :, :1])
            parts.append(part if block.there is None else part & block.there[:, None, None])
        return torch.cat(parts, dim=2)

    def _depths(self, codes: Tensor, depth: int) -> Tensor:
        """[B, W]: tokens between the root and the entries, separators included."""
        there = [block.there for block in self._blocks if block.there is not None]
        more = torch.stack(there).sum(dim=0) if there else torch.zeros_like(self._paired)
        return (depth + more)[:, None].expand_as(codes)
