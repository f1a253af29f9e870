"""Laws seen: the best codes of every law that the target gave, by position and by the code it was read below.

The same code at the same position has much the same law behind it, whatever stands further above. Dimensions:
B images, P positions, N laws of a pass, L levels, K candidates a law.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAWS = 16  # kept a position, which sees a handful of passes before it is reached
UNSEEN = -1
SAME_CODE = 2**40  # more than the stamps of any run


class SeenLaws:
    """The last LAWS laws of every position, each with the code it was read below.

    State: K codes and log-confidences a law, nothing of the vocabulary's size. Row P, the last, takes what is
    not to be kept, and is never seen.
    """

    def __init__(self, positions: int, slots: int, candidates: int, device: torch.device) -> None:
        """positions: P; candidates: K."""
        self._none = positions
        laws = (positions + 1) * LAWS
        self._above = torch.full((slots, laws), UNSEEN, device=device)
        self._stamp = torch.full((slots, laws), UNSEEN, device=device)
        self._codes = torch.zeros(slots, laws, candidates, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(slots, laws, candidates, device=device)
        self._next = torch.zeros(slots, positions + 1, dtype=torch.int64, device=device)
        self._passes = 0

    @property
    def candidates(self) -> int:
        """K."""
        return self._codes.shape[-1]

    def clear(self, slot: int) -> None:
        """Forget an image."""
        self._above[slot] = self._stamp[slot] = UNSEEN

    def write(self, at: Tensor, above: Tensor, codes: Tensor, confidence: Tensor, order: Tensor) -> None:
        """Keep a pass's laws of positions at [B, N] (P: not kept), read below the codes above [B, N]: codes
        and log-confidences [B, N, K]. Of one position's laws that least in order [B, N], all different,
        counts as the newest; of more than LAWS the least are kept."""
        same = at[:, :, None] == at[:, None]
        rank = (same & (order[:, None] < order[:, :, None])).sum(dim=2)
        last = same.sum(dim=2).clamp(max=LAWS) - 1
        at = at.masked_fill(rank >= LAWS, self._none)
        # The best of a pass goes in last, so that later passes overwrite it last.
        place = at * LAWS + (self._next.gather(1, at) + last - rank) % LAWS
        self._passes += 1
        self._stamp.scatter_(1, place, self._passes * LAWS - 1 - rank)
        self._above.scatter_(1, place, above)
        whole = place[..., None].expand_as(codes)
        self._codes.scatter_(1, whole, codes)
        self._confidence.scatter_(1, whole, confidence)
        self._next.scatter_add_(1, at, torch.ones_like(at))
        self._stamp[:, -LAWS:] = self._above[:, -LAWS:] = UNSEEN

    def around(self, at: Tensor) -> Around:
        """The laws of positions at [B, L]."""
        places = at[..., None] * LAWS + torch.arange(LAWS, device=at.device)
        flat = places.flatten(1)
        stamp = self._stamp.gather(1, flat).view_as(places)
        return Around(places, self._above.gather(1, flat).view_as(places), stamp)

    def read(self, place: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best `width` codes and their log-confidences [B, L, width] of the laws at place [B, L]."""
        index = place[..., None].expand(-1, -1, width)
        return self._codes.gather(1, index), self._confidence.gather(1, index)


@dataclass(frozen=True, slots=True)
class Around:
    """The laws of some positions [B, L, LAWS]: where they are kept, the codes above them, and how new."""

    places: Tensor
    above: Tensor
    stamp: Tensor

    @property
    def known(self) -> Tensor:
        """[B, L] bool: whether there is a law at all."""
        return (self.stamp >= 0).any(dim=2)

    def newest(self) -> Tensor:
        """The place [B, L] of each position's newest law."""
        return self._pick(self.stamp)[0]

    def below(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """The place [B, L] of the newest law read below code [B, L], or of the newest of all where there is
        none, and which of the two it is (True: below the code)."""
        return self._pick(self.stamp + SAME_CODE * (self.above == code[..., None]))

    def _pick(self, stamp: Tensor) -> tuple[Tensor, Tensor]:
        latest, which = stamp.max(dim=2, keepdim=True)
        return self.places.gather(2, which)[..., 0], latest[..., 0] >= SAME_CODE
