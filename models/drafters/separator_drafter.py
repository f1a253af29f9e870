"""The EAGLE drafter beside a target with row separators: it reads and drafts the whole token sequence.

A separator is an entry like any other: the pair (feature at the row's last code, separator) stands before the
pair (feature at the separator, next code). Where a drafted level lies in the last column the network runs
once more, over the separators behind it, and the next level grows from there.

Dimensions: G guidance branches, B slots, A path nodes, W nodes of a level, E nodes expanded so far, D
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.roles import Prefix
from models.drafter import EagleDrafter
from models.separators import SeparatorTarget, kept_first, tokens_in


@dataclass(frozen=True, slots=True)
class _Block:
    """Entries of the drafter's scratch: one level's nodes, or the separators behind them."""

    of: slice | None  # the level's columns in `ancestors`; None: the root
    there: Tensor | None  # [B] bool: slots in which the separators exist; None: these are nodes


class SeparatorDrafter:
    """The Drafter of codes over a drafter of tokens; features are those of SeparatorTarget, [.., 2D]. Counts
    of drafter calls leave out the passes over separators."""

    def __init__(self, tokens: EagleDrafter, target: SeparatorTarget) -> None:
        """tokens: over target.tokens, with room for trees of twice the depth and one level more."""
        self.tokens, self.target, self.device = tokens, target, tokens.device
        self._row = tokens.net.config.hidden_size
        self._paired = torch.zeros(target.slots, dtype=torch.int64, device=self.device)  # [B] codes paired
        # Codes the target has committed, which is the root's index; of idle slots 0, whatever was paired.
        self._committed: Sequence[int] = [0] * target.slots
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

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Commit the pairs, separators among them; then read the one behind the root, if there is one."""
        width, pairs = self.target.grid.width, codes.shape[1]
        self._committed = committed
        own, read = features.split(self._row, dim=-1)
        order = torch.arange(pairs, device=self.device)
        index = self._paired[:, None] + order
        self._paired += count
        if any(self._first_columns(root, pairs) for root in committed):
            new = order < count[:, None]
            keep = torch.stack((new & (index % width == 0) & (index > 0), new), dim=2)
            at = kept_first(keep)
            tokens = torch.stack((torch.full_like(codes, self.target.separator), codes), dim=2)
            both = torch.stack((own, read), dim=3).flatten(2, 3)
            read = both.gather(2, at[None, ..., None].expand_as(both))
            codes, count = tokens.flatten(1).gather(1, at), keep.flatten(1).sum(dim=1)
        known = [tokens_in(done, width) for done in committed]
        logits, feature = self.tokens.extend(read, codes, count, known)
        self._blocks = []
        logits, feature = self._pass_separators(None, logits[:, :, None], feature[:, :, None], 0)
        return logits[:, :, 0], feature[:, :, 0]

    def _first_columns(self, root: int, pairs: int) -> int:
        """How many of the last `pairs` codes up to the root's index may begin a row, but for the first."""
        first = max(root - pairs + 1, 1)
        return root // self.target.grid.width - (first - 1) // self.target.grid.width

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
        """Logits and features of a level `below` the root; where it is the last column, those behind its
        separators."""
        width, last = self.target.grid.width, self.target.grid.width - 1
        if all((root + below) % width != last for root in self._committed):
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
