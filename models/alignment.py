"""The alignment of a drafter: which token it reads beside each feature (option --drafter_alignment).

With tokens t and features f, entry p of a drafter's cache predicts the feature at p + 1 from a pair:

    published   (f[p], t[p + 1])   with the token that the target generated from f[p]: EAGLE, arXiv:2401.15077
    unshifted   (f[p], t[p])       with the feature's own token

The released code drafts with the first and trains the drafters of Anole and Lumina-mGPT with the second. A
drafter works best the way it was trained, which is not published for these two: cli.acceptance_rates
measures both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.target import ARTarget


class Shifted:
    """Pairs each feature with the token after it."""

    behind = 0  # entries by which a cell's code stands later than in this alignment

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        """Returns the tokens that are paired with a prompt's features, for all features but the last. That
        one is paired by committed(), once the first code is known."""
        return tokens[1:]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        """Returns the codes [B, A] to pair with the features from which the target generated `codes` [B, A].

        The first count [B] codes of a row are valid, perhaps none.
        """
        return codes

    def drafted(self, codes: Tensor, above: Tensor) -> Tensor:
        """Returns the codes [B, W] to pair with the features of a level's parents. See Drafter.expand."""
        return codes


class Unshifted:
    """Pairs each feature with its own token: the code before the one that the target generated from it."""

    behind = 1

    def __init__(self, slots: int, first_code: int, device: torch.device) -> None:
        self._first_code = first_code
        # [B]: the newest code of each slot; before the first code, the prompt's last token less first_code.
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        self._newest[slot] = tokens[-1] - self._first_code
        return tokens[:-1]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        before = torch.cat((self._newest[:, None], codes[:, :-1]), dim=1)
        last = codes.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0]
        self._newest.copy_(torch.where(count > 0, last, self._newest))
        return before

    def drafted(self, codes: Tensor, above: Tensor) -> Tensor:
        return above


def pairing(alignment: str, target: ARTarget) -> Shifted | Unshifted:
    """Returns the pairing of tokens with features in that alignment, for a drafter of this target."""
    if alignment == "published":
        return Shifted()
    return Unshifted(target.slots, target.first_code, target.device)
