"""Which token a drafter reads beside a feature.

EAGLE pairs the feature at p with the token at p + 1, and so does the released code when it drafts. When it
trains Anole's and Lumina's drafters it pairs feature and token of one position: such a drafter has never been
shown the newest code, and may draft better the way it was trained. Either way entry p of the drafter's cache
predicts the feature at p + 1.

Dimensions: B images, A path slots, W nodes of a level, E nodes expanded so far. Codes may be any token less
first_code.
"""

from __future__ import annotations

import torch
from torch import Tensor


class NextToken:
    """The token of every entry of a drafter's cache: the one behind the feature's, a new code or a node's
    own."""

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        """Tokens of the entries of a prompt, one fewer than it has."""
        return tokens[1:]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        """Of the entries of new features: codes [B, A] follow each, `count` [B] of them valid."""
        return codes

    def drafted(self, codes: Tensor, ancestors: Tensor) -> Tensor:
        """Of the entries of drafted nodes: their codes [B, W], ancestors [B, W, E] as Drafter.expand."""
        return codes


class SameToken(NextToken):
    """Instead the feature's own token: the code before a new one, or a node's parent's."""

    def __init__(self, slots: int, first_code: int, device: torch.device) -> None:
        """Until codes are committed, the newest is the prompt's last token."""
        self._first_code = first_code
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)  # [B]
        self._nodes = self._newest[:, None][:, :0]  # [B, E] codes expanded in the newest tree

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        self._newest[slot] = tokens[-1] - self._first_code
        return tokens[:-1]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        own = torch.cat((self._newest[:, None], codes[:, :-1]), dim=1)
        self._newest.copy_(codes.gather(1, count[:, None] - 1)[:, 0])
        return own

    def drafted(self, codes: Tensor, ancestors: Tensor) -> Tensor:
        # Levels follow one another, so the parent is the last ancestor among earlier nodes.
        earlier = ancestors.shape[2] - codes.shape[1]
        known = torch.cat((self._newest[:, None], self._nodes[:, :earlier]), dim=1)
        self._nodes = torch.cat((known[:, 1:], codes), dim=1)
        number = torch.arange(earlier + 1, device=codes.device)  # 0: the root, which every node sees
        sees = torch.cat((torch.ones_like(ancestors[..., :1]), ancestors[..., :earlier]), dim=2)
        return known.gather(1, (sees * number).amax(dim=2))
