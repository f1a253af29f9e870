"""A target whose model ends every row of the image with a token of its own (Lumina-mGPT).

The method sees codes alone. Row ends are forced: they are no choices, cost no sampling and no level of a
tree. Behind every node in the last column the pass carries one more row, the row end, as that node's only
child; what follows the node hangs below the row end, and the law after the node is read there.

Dimensions: G guidance branches, B slots, N nodes, K row ends, M = N + K, A path slots, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.roles import Prefix, Scored
from adt_tree.transfer import to_device
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from models.target import ARTarget


def tokens_in(codes: int, width: int) -> int:
    """Tokens that the first `codes` codes take, and the place of the next one: a full row is followed by its
    end."""
    return codes + codes // width


@dataclass(frozen=True, slots=True)
class RowEnds:
    """Where a tree's row ends are."""

    last: Tensor  # [B, N] bool: nodes that a row end follows
    read: Tensor  # [B, N]: the row where the law after a node is read


@dataclass(frozen=True, slots=True)
class Extended:
    """A tree with its row ends behind it: rows [0, N) are its nodes, rows [N, M) row ends."""

    codes: Tensor  # [B, M]
    depths: Tensor  # [B, M] tokens below the root
    ancestors: Tensor  # [B, M, M] bool
    ends: RowEnds


def extend(tree: DraftTree, last: Tensor, most: int, row_end: int) -> Extended:
    """Append a row end to the nodes that last [B, N] marks, of which no image has more than `most`."""
    pick = last.int().sort(dim=1, descending=True, stable=True).indices[:, :most]  # [B, K]
    real = last.gather(1, pick)
    nodes, ends = tree.nodes, pick.shape[1]
    above = tree.ancestors.gather(2, pick[:, None].expand(-1, nodes, -1)) & real[:, None]
    number = torch.arange(nodes, device=pick.device)
    below_end = above & (number[:, None] != pick[:, None])  # [B, N, K]: node n lies below row end k
    own = pick[..., None]
    eye = torch.eye(ends, dtype=torch.bool, device=pick.device)
    ancestors = torch.cat(
        (
            torch.cat((tree.ancestors, below_end), dim=2),
            torch.cat(
                (
                    tree.ancestors.gather(1, own.expand(-1, -1, nodes)),
                    below_end.gather(1, own.expand(-1, -1, ends)) | eye,
                ),
                dim=2,
            ),
        ),
        dim=1,
    )
    depths = tree.depths + below_end.sum(dim=2)
    at = torch.arange(nodes, nodes + ends, device=pick.device)
    return Extended(
        codes=torch.cat((tree.codes, torch.full_like(pick, row_end)), dim=1),
        depths=torch.cat((depths, depths.gather(1, pick) + 1), dim=1),
        ancestors=ancestors,
        ends=RowEnds(last, number.expand_as(last).scatter(1, pick, torch.where(real, at, pick))),
    )


def compact(keep: Tensor) -> Tensor:
    """Indices [B, 2A] that bring the entries kept of [B, A, 2] to the front, in order."""
    return (~keep.flatten(1)).int().sort(dim=1, stable=True).indices


class LineTarget:
    """See adt_tree.roles.Target: a target of codes over a target of tokens.

    Features [.., 2D] of a node: those of its own row, then those of the row where the law after it is read,
    which differ in the last column. Drafters that know of row ends need both.
    """

    def __init__(self, tokens: ARTarget, grid: Grid, row_end: int) -> None:
        """tokens: over grid.height rows of grid.width + 1 tokens, with room for trees twice as large.
        row_end: token id."""
        assert tokens.grid == Grid(grid.height, grid.width + 1)
        self.tokens, self.grid = tokens, grid
        self.row_end = row_end - tokens.first_code  # outside the codebook
        self.num_codes, self.slots, self.device = tokens.num_codes, tokens.slots, tokens.device
        self.passes = tokens.passes

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """See Target."""
        prefix = self.tokens.prefill(slot, prompt)
        return Prefix(prefix.logits, [torch.cat((branch, branch), dim=-1) for branch in prefix.features])

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """See Target; rows: the RowEnds, None if the trees have none."""
        most, reach = self._most_ends(tree, committed), self.tokens_in(max(committed))
        if most == 0:
            scored = self.tokens.score(tree.codes, tree.depths, tree.ancestors, reach)
            return Scored(scored.logits, torch.cat((scored.features, scored.features), dim=-1))
        column = (to_device(committed, self.device)[:, None] + tree.depths) % self.grid.width
        last = (column == self.grid.width - 1) & tree.valid
        rows = extend(tree, last, most, self.row_end)
        scored = self.tokens.score(rows.codes, rows.depths, rows.ancestors, reach)
        logits, read = (self._at(x, rows.ends.read) for x in (scored.logits, scored.features))
        return Scored(logits, torch.cat((scored.features[:, :, : tree.nodes], read), dim=-1), rows.ends)

    @staticmethod
    def _at(x: Tensor, rows: Tensor) -> Tensor:
        """x [G, B, M, ...] at rows [B, N]."""
        return x.gather(2, rows[None, ..., None].expand(x.shape[0], -1, -1, x.shape[-1]))

    def commit(self, verdict: Verdict, scored: Scored) -> None:
        """See Target: the path with the row ends on it."""
        ends = scored.rows
        if ends is None:
            return self.tokens.commit(verdict, scored)
        taken = torch.arange(verdict.path.shape[1], device=self.device) < verdict.count[:, None]
        pairs = torch.stack((verdict.path, ends.read.gather(1, verdict.path)), dim=2)
        keep = torch.stack((taken, taken & ends.last.gather(1, verdict.path)), dim=2)
        path = pairs.flatten(1).gather(1, compact(keep))
        return self.tokens.commit(Verdict(path, keep.flatten(1).sum(dim=1), verdict.codes), scored)

    def release(self, slot: int) -> None:
        """See Target."""
        self.tokens.release(slot)

    def tokens_in(self, codes: int) -> int:
        """Tokens that so many committed codes take."""
        return tokens_in(codes, self.grid.width)

    def _most_ends(self, tree: DraftTree, committed: Sequence[int]) -> int:
        """A bound on the row ends any tree needs, known to the host: a level of depth d holds at most N - d
        nodes."""
        width = self.grid.width

        def ends(start: int) -> int:
            levels = range((width - 1 - start) % width, tree.depth + 1, width)
            return sum(1 if depth == 0 else max(tree.nodes - depth, 0) for depth in levels)

        return min(tree.nodes, max(map(ends, committed)))
