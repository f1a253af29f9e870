"""A target whose model ends every row of the image with a separator token (Lumina-mGPT), and its drafter.

The decoding method sees codes alone. As the model has no choice at the end of a row, a separator takes no
noise, no sampling and no level of a tree. A pass of the target adds a separator after each node in the last
column. The children of the node in the tree of codes become children of its separator in the tree of tokens,
and the distribution after the node is read at the separator. With two codes a row and the root in column 0:

    tree of codes    0 - 1 - 2 - 3        in columns 0, 1, 0, 1
                     + - 4                in column 1
    tree of tokens   0 - 1 - s - 2 - 3 - s
                     + - 4 - s

Dimensions: G guidance branches, B slots, N nodes, K separators, M = N + K rows of a pass, A path nodes, W
nodes of a level, E nodes expanded so far, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.roles import Prefix, Scored
from adt_tree.tree import DraftTree, to_device, valid_first
from adt_tree.verify import Verdict
from models.drafter import EagleDrafter
from models.target import ARTarget


def num_tokens(codes: int, width: int) -> int:
    """Returns the number of tokens of the first `codes` codes: a separator follows every row of `width`."""
    return codes + codes // width


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree of codes with its separators: rows [0, N) are the nodes, rows [N, M) the separators."""

    codes: Tensor  # [B, M]
    depths: Tensor  # [B, M]: number of tokens below the root
    ancestors: Tensor  # [B, M, M] bool
    ends_row: Tensor  # [B, N] bool: whether a separator follows the node
    read: Tensor  # [B, N]: the row where the distribution after a node is read


def separate(tree: DraftTree, ends_row: Tensor, max_separators: int, separator: int) -> TokenTree:
    """Adds a separator after each node that ends_row [B, N] marks. max_separators: a bound on these nodes in
    any tree; trees with fewer are padded by rows that nobody reads. separator: the separator's code."""
    nodes = tree.nodes
    # The node before each separator, [B, K]: marked nodes first, in their order, then padding.
    node_before = ends_row.int().sort(dim=1, descending=True, stable=True).indices[:, :max_separators]
    valid = ends_row.gather(1, node_before)
    num_separators = node_before.shape[1]
    number = torch.arange(nodes, device=node_before.device)
    # A node lies below separator k if it lies below the node before it: [B, N, K].
    at_or_below = tree.ancestors.gather(2, node_before[:, None].expand(-1, nodes, -1)) & valid[:, None]
    below = at_or_below & (number[:, None] != node_before[:, None])
    # A separator's ancestors: those of the node before it, the separators above that node, and itself.
    index = node_before[..., None]
    above = tree.ancestors.gather(1, index.expand(-1, -1, nodes))
    eye = torch.eye(num_separators, dtype=torch.bool, device=node_before.device)
    separators_above = below.gather(1, index.expand(-1, -1, num_separators)) | eye
    rows = (torch.cat((tree.ancestors, below), dim=2), torch.cat((above, separators_above), dim=2))
    depths = tree.depths + below.sum(dim=2)
    row = torch.arange(nodes, nodes + num_separators, device=node_before.device)
    return TokenTree(
        codes=torch.cat((tree.codes, torch.full_like(node_before, separator)), dim=1),
        depths=torch.cat((depths, depths.gather(1, node_before) + 1), dim=1),
        ancestors=torch.cat(rows, dim=1),
        ends_row=ends_row,
        read=number.expand_as(ends_row).scatter(1, node_before, torch.where(valid, row, node_before)),
    )


def max_nodes(tree: DraftTree, depth: int) -> int:
    """Returns a bound, known to the host, on an image's nodes at this depth. Each level above it has a node,
    and a node has at most tree.width children; in a leafy chain only one node of the level above has any."""
    return min(tree.width ** min(depth, 1 if tree.leafy_chain else depth), max(tree.nodes - depth, 0))


class SeparatorTarget:
    """The Target of codes made of a target of tokens.

    Features are [.., 2D]: the features at a node, then those where the distribution after it is read, which
    differ in the last column. A SeparatorDrafter needs both.
    """

    def __init__(self, tokens: ARTarget, grid: Grid, separator: int) -> None:
        """tokens: a target over rows of grid.width + 1, with room for trees of twice as many nodes.
        separator: token id."""
        assert tokens.grid == Grid(grid.height, grid.width + 1)
        self.tokens, self.grid = tokens, grid
        self.separator = separator - tokens.first_code  # as a code: outside the codebook
        self.num_codes, self.slots, self.device = tokens.num_codes, tokens.slots, tokens.device
        self.run, self.few_shapes = tokens.run, tokens.few_shapes
        self._token_tree: TokenTree | None = None  # of the last pass; None: it had no separators

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        prefix = self.tokens.prefill(slot, prompt)
        return Prefix(prefix.logits, [torch.cat((branch, branch), dim=-1) for branch in prefix.features])

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        max_separators = self._max_separators(tree, committed)
        rows = self.tokens.rows(tree.nodes + max_separators)
        width = self.grid.width
        bounds = self.tokens.bounds([num_tokens(n, width) for n in committed])
        if max_separators == 0:
            self._token_tree = None
            return self.run(self._score_nodes, tree.codes, tree.depths, tree.ancestors, bounds, rows)
        roots = to_device(committed, self.device)
        scored, self._token_tree = self.run(self._score_separated, tree, roots, bounds, rows)
        return scored

    def _score_nodes(
        self, codes: Tensor, depths: Tensor, ancestors: Tensor, bounds: tuple[int, ...], rows: int
    ) -> Scored:
        """Scores trees without separators."""
        scored = self.tokens.score(codes, depths, ancestors, bounds, rows)
        return Scored(scored.logits, torch.cat((scored.features, scored.features), dim=-1))

    def _score_separated(
        self, tree: DraftTree, roots: Tensor, bounds: tuple[int, ...], rows: int
    ) -> tuple[Scored, TokenTree]:
        """Scores trees with as many separators as the pass has rows for. roots [B]: the roots' indices."""
        column = (roots[:, None] + tree.depths) % self.grid.width
        ends_row = (column == self.grid.width - 1) & tree.valid
        tokens = separate(tree, ends_row, rows - tree.nodes, self.separator)
        scored = self.tokens.score(tokens.codes, tokens.depths, tokens.ancestors, bounds, rows)
        logits, read = (self._at(x, tokens.read) for x in (scored.logits, scored.features))
        features = torch.cat((scored.features[:, :, : tree.nodes], read), dim=-1)
        return Scored(logits, features), tokens

    @staticmethod
    def _at(x: Tensor, rows: Tensor) -> Tensor:
        """Returns x [G, B, M, ...] at rows [B, N]."""
        return x.gather(2, rows[None, ..., None].expand(x.shape[0], -1, -1, x.shape[-1]))

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        if self._token_tree is None:
            self.tokens.commit(tree, verdict)
        else:
            self.run(self._commit_separated, self._token_tree.read, self._token_tree.ends_row, verdict)

    def _commit_separated(self, read: Tensor, ends_row: Tensor, verdict: Verdict) -> None:
        """Commits the accepted nodes, and a separator after each that ends a row."""
        accepted = torch.arange(verdict.path.shape[1], device=self.device) < verdict.count[:, None]
        pairs = torch.stack((verdict.path, read.gather(1, verdict.path)), dim=2)
        valid = torch.stack((accepted, accepted & ends_row.gather(1, verdict.path)), dim=2)
        path = pairs.flatten(1).gather(1, valid_first(valid.flatten(1)))
        self.tokens.commit_path(path, valid.flatten(1).sum(dim=1))

    def release(self, slot: int) -> None:
        self.tokens.release(slot)

    def _max_separators(self, tree: DraftTree, committed: Sequence[int]) -> int:
        """Returns a bound, known to the host, on the separators of any image's tree."""
        width = self.grid.width

        def separators(root: int) -> int:
            return sum(max_nodes(tree, d) for d in range((width - 1 - root) % width, tree.depth + 1, width))

        return min(tree.nodes, max(map(separators, committed)))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of the drafter since extend(): the nodes of a level, or the separators after them."""

    columns: slice | None  # the level's columns of `ancestors`; None: the root, which has no column there
    ends_row: Tensor | None  # [B] bool: slots whose level has separators; None: this pass held the nodes


@dataclass(frozen=True, slots=True)
class RowContext:
    """The columns of all roots, as far as the drafter's passes depend on them. The host knows them without
    waiting for the device. Steps of equal contexts have passes of equal shapes.

    Example with rows of 4 codes: the roots of two images are codes 6 and 9, in columns 2 and 1. Separators
    precede codes 4 and 8, which are 2 and 1 codes before the roots, so since_separator is 1. The last column
    is 1 and 2 levels below the roots, so ends is {1, 2}.
    """

    tokens: int  # a bound on the tokens in any slot's prefix
    since_separator: int  # least column of the roots that have a separator before them; width if none has
    ends: frozenset[int]  # levels below the roots, modulo the width, that may lie in the last column


class SeparatorDrafter:
    """The Drafter of codes made of a drafter of tokens. Features are those of SeparatorTarget.

    The drafter's cache holds separators like any other token: the pair (feature at the last code of a row,
    separator) stands before the pair (feature at the separator, next code). Where a drafted level lies in the
    last column, the network runs once more over the separators after it, and the next level grows from there.
    Counts of drafter calls leave these runs out.
    """

    def __init__(self, tokens: EagleDrafter, target: SeparatorTarget, max_depth: int) -> None:
        """tokens: a drafter beside target.tokens, with room for trees of 2 * max_depth + 1 levels."""
        self.tokens, self.target, self.device = tokens, target, tokens.device
        self._max_depth = max_depth
        self._feature_size = tokens.net.config.hidden_size  # D
        self._num_pairs = torch.zeros(target.slots, dtype=torch.int64, device=self.device)  # [B], of codes
        self._ends = frozenset[int]()  # RowContext.ends of the last extend()
        self._passes: list[_Pass] = []

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        self._num_pairs[slot : slot + 1] = 0
        features = [branch[:, : self._feature_size] for branch in prefix.features]
        self.tokens.prefill(slot, prompt, Prefix(prefix.logits, features))

    def release(self, slot: int) -> None:
        self._num_pairs[slot : slot + 1] = 0
        self.tokens.release(slot)

    def context(self, committed: Sequence[int]) -> RowContext:
        """Takes `committed` as the indices of the roots. With few_shapes there are few contexts: all levels
        may end a row, or none."""
        width = self.target.grid.width
        since_separator = min((root % width for root in committed if root >= width), default=width)
        ends = frozenset(width - 1 - root % width for root in committed)
        if self.target.few_shapes:
            since_separator = 0 if since_separator <= self._max_depth else width
            ends = frozenset(range(width) if min(ends) <= self._max_depth else ())
        tokens = self.tokens.context([num_tokens(root, width) for root in committed])
        return RowContext(tokens, since_separator, ends)

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, context: RowContext
    ) -> tuple[Tensor, Tensor]:
        """Also commits the separators among the codes. If the root ends a row, the network also runs over the
        separator after it."""
        width, pairs = self.target.grid.width, codes.shape[1]
        self._ends = context.ends
        at_code, read = features.split(self._feature_size, dim=-1)
        order = torch.arange(pairs, device=self.device)
        index = self._num_pairs[:, None] + order
        self._num_pairs += count
        if context.since_separator < pairs:
            # Two entries a code: the separator before it, valid if it starts a row, and the code itself.
            valid = order < count[:, None]
            valid = torch.stack((valid & (index % width == 0) & (index > 0), valid), dim=2)
            entry = valid_first(valid.flatten(1))
            tokens = torch.stack((torch.full_like(codes, self.target.separator), codes), dim=2)
            both = torch.stack((at_code, read), dim=3).flatten(2, 3)
            read = both.gather(2, entry[None, ..., None].expand_as(both))
            codes, count = tokens.flatten(1).gather(1, entry), valid.flatten(1).sum(dim=1)
        logits, feature = self.tokens.extend(read, codes, count, context.tokens)
        self._passes = []
        logits, feature = self._pass_separators(None, logits[:, :, None], feature[:, :, None], 0)
        return logits[:, :, 0], feature[:, :, 0]

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """If the level ends a row, the network also runs over the separators after it."""
        columns = slice(ancestors.shape[2] - codes.shape[1], ancestors.shape[2])
        self._passes.append(_Pass(columns, None))
        token_ancestors, depths = self._token_ancestors(ancestors), self._token_depths(codes, depth)
        logits, features = self.tokens.expand_at(codes, features, token_ancestors, depths)
        return self._pass_separators(columns, logits, features, depth + 1, ancestors)

    def _pass_separators(
        self,
        columns: slice | None,
        logits: Tensor,
        features: Tensor,
        level: int,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits and features of a level. In slots where the level lies in the last column they
        are those at its separators. level: 0 is the root. columns, ancestors: as in _Pass and expand()."""
        width, last_column = self.target.grid.width, self.target.grid.width - 1
        if level % width not in self._ends:
            return logits, features
        ends_row = (self._num_pairs - 1 + level) % width == last_column
        separators = torch.full(features.shape[1:3], self.target.separator, device=self.device)
        eye = torch.eye(separators.shape[1], dtype=torch.bool, device=self.device)
        token_ancestors = eye.expand(len(separators), -1, -1)
        if ancestors is not None:
            token_ancestors = torch.cat((self._token_ancestors(ancestors), token_ancestors), dim=2)
        depths = self._token_depths(separators, level)
        separator_logits, separator_features = self.tokens.expand_at(
            separators, features, token_ancestors, depths
        )
        self._passes.append(_Pass(columns, ends_row))
        choose = ends_row[None, :, None, None]
        return (
            torch.where(choose, separator_logits, logits),
            torch.where(choose, separator_features, features),
        )

    def _token_ancestors(self, ancestors: Tensor) -> Tensor:
        """Returns the ancestors [B, W, E] of nodes with the columns of separators added, one column for each
        entry since extend(). A separator is an ancestor if the node before it is. The newest nodes have no
        separators yet."""
        parts, root = [], torch.ones_like(ancestors[:, :, :1])
        for done in self._passes:
            nodes = root if done.columns is None else ancestors[:, :, done.columns]
            parts.append(nodes if done.ends_row is None else nodes & done.ends_row[:, None, None])
        return torch.cat(parts, dim=2)

    def _token_depths(self, codes: Tensor, depth: int) -> Tensor:
        """Returns the number of tokens between the root and the entries, [B, W], of a level of that depth."""
        separated = [done.ends_row for done in self._passes if done.ends_row is not None]
        num_separators = torch.stack(separated).sum(dim=0) if separated else torch.zeros_like(self._num_pairs)
        return (depth + num_separators)[:, None].expand_as(codes)
