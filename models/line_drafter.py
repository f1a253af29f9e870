"""The EAGLE drafter beside a target with row ends: it reads and drafts the whole token sequence.

A row end is an entry like any other: the pair (feature at the row's last code, row end) stands before the
pair (feature at the row end, next code). Where a drafted level lies in the last column the network runs once
more, over the row ends behind it, and the next level grows from there.

Dimensions: G guidance branches, B slots, A path slots, W nodes of a level, E nodes expanded so far, D
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.passes import DIRECT, Passes
from adt_tree.roles import Prefix
from models.drafter import EagleDrafter
from models.lines import LineTarget, compact
from models.target import by_branch


@dataclass(frozen=True, slots=True)
class _Block:
    """Entries of the drafter's scratch: one level's nodes, or the row ends behind them."""

    of: slice | None  # the level's columns in `ancestors`; None: the root
    there: Tensor | None  # [B] bool: slots in which the row ends exist; None: these are nodes


class LineDrafter:
    """See adt_tree.roles.Drafter; features are those of LineTarget, [.., 2D]. Counts of drafter calls leave
    out the passes over row ends."""

    def __init__(self, tokens: EagleDrafter, target: LineTarget) -> None:
        """tokens: over target.tokens, with room for trees of twice the depth and one level more."""
        self.tokens, self.target = tokens, target
        self.device, self.deepest = tokens.device, (tokens.deepest - 1) // 2
        self.passes: Passes = DIRECT  # where a level needs a pass over row ends is known to the host alone
        self._row = tokens.net.config.hidden_size
        self._taken = torch.zeros(target.slots, dtype=torch.int64, device=self.device)  # [B] codes paired
        # Codes the target has committed, which is the root's index; of idle slots 0, whatever was paired.
        self._known: Sequence[int] = [0] * target.slots
        self._blocks: list[_Block] = []

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """See Drafter."""
        self._taken[slot] = 0
        own = [branch[:, : self._row] for branch in prefix.features]
        self.tokens.prefill(slot, prompt, Prefix(prefix.logits, own))

    def release(self, slot: int) -> None:
        """See Drafter."""
        self._taken[slot] = 0
        self.tokens.release(slot)

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """See Drafter: the pairs, row ends among them; then the row end behind the root, if there is one."""
        width, pairs = self.target.grid.width, codes.shape[1]
        self._known, known = committed, [self.target.tokens_in(codes) for codes in committed]
        own, read = features.split(self._row, dim=-1)
        order = torch.arange(pairs, device=self.device)
        index = self._taken[:, None] + order
        self._taken += count
        if any(self._first_columns(root, pairs) for root in self._known):
            new = order < count[:, None]
            keep = torch.stack((new & (index % width == 0) & (index > 0), new), dim=2)
            at = compact(keep)
            tokens = torch.stack((torch.full_like(codes, self.target.row_end), codes), dim=2)
            both = torch.stack((own, read), dim=3).flatten(2, 3)
            read = both.gather(2, at[None, ..., None].expand_as(both))
            codes, count = tokens.flatten(1).gather(1, at), keep.flatten(1).sum(dim=1)
        logits, feature = self.tokens.extend(read, codes, count, known)
        self._blocks = []
        logits, ended = self._end_row(None, logits[:, :, None], feature[:, :, None], 0, max(known))
        return logits[:, :, 0], ended[:, :, 0]

    def _first_columns(self, root: int, pairs: int) -> int:
        """How many of the last `pairs` codes up to the root's index may begin a row, but for the first."""
        first = max(root - pairs + 1, 1)
        return root // self.target.grid.width - (first - 1) // self.target.grid.width

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int, reach: int
    ) -> tuple[Tensor, Tensor]:
        """See Drafter."""
        reach, width = self.target.tokens_in(reach), codes.shape[1]
        own = slice(ancestors.shape[2] - width, ancestors.shape[2])
        self._blocks.append(_Block(own, None))
        seen, depths = self._seen(ancestors), self._depths(codes, depth)
        logits, features = self.tokens.place(codes, features, seen, depths, reach)
        return self._end_row(own, logits, features, depth + 1, reach, ancestors)

    def _end_row(
        self,
        level: slice | None,
        logits: Tensor,
        features: Tensor,
        below: int,
        reach: int,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of a level `below` the root; where it is the last column, those behind its row
        ends."""
        width, last = self.target.grid.width, self.target.grid.width - 1
        if all((root + below) % width != last for root in self._known):
            return logits, features
        there = (self._taken - 1 + below) % width == last
        ends = torch.full(features.shape[1:3], self.target.row_end, device=self.device)
        eye = torch.eye(ends.shape[1], dtype=torch.bool, device=self.device).expand(len(ends), -1, -1)
        seen = eye if ancestors is None else torch.cat((self._seen(ancestors), eye), dim=2)
        after, ended = self.tokens.place(ends, features, seen, self._depths(ends, below), reach)
        self._blocks.append(_Block(level, there))
        choose = there[None, :, None, None]
        return torch.where(choose, after, logits), torch.where(choose, ended, features)

    def _seen(self, ancestors: Tensor) -> Tensor:
        """ancestors [B, W, E] over the scratch's entries, row ends included: whoever sees a node and is not
        it sees its row end."""
        parts = []
        for block in self._blocks:
            part = ancestors[:, :, block.of] if block.of is not None else torch.ones_like(ancestors[:, :, :1])
            parts.append(part if block.there is None else part & block.there[:, None, None])
        return torch.cat(parts, dim=2)

    def _depths(self, codes: Tensor, depth: int) -> Tensor:
        """[R, W]: tokens between the root and the entries, row ends included."""
        ends = [block.there for block in self._blocks if block.there is not None]
        more = torch.stack(ends).sum(dim=0) if ends else torch.zeros_like(self._taken)
        return by_branch((depth + more)[:, None].expand_as(codes), self.tokens.target.branches)
