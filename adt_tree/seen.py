"""Laws seen: the best codes of every law that the target gave, by position and by the code it was read below.

The same code at the same position has much the same law behind it, whatever stands further above. Dimensions:
B images, P positions, N laws of a pass, L levels, K candidates a law, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAWS = 8  # kept a position, which sees a handful of passes before it is reached
UNSEEN = -1
SAME_CODE = 2**40  # more than the stamps of any run
# How many times as much as another a law counts (docs/LOG.md): read below the very code that stands before
# the position; by the newest pass that read the position; the newest of all.
BELOW, LATE, NEWEST = 10.0, 2.0, 2.0


class SeenLaws:
    """The last LAWS laws of every position, each with the code it was read below.

    State: K codes and log-confidences a law, nothing of the vocabulary's size. Position P takes what is not
    to be kept, and is never seen.
    """

    def __init__(self, positions: int, slots: int, candidates: int, device: torch.device) -> None:
        """positions: P; candidates: K."""
        self._none, self.candidates = positions, candidates
        rows = slots * (positions + 1)  # of an image after another
        self._starts = torch.arange(0, rows, positions + 1, device=device)[:, None]
        self._above = torch.full((rows, LAWS), UNSEEN, device=device)
        self._stamp = torch.full((rows, LAWS), UNSEEN, device=device)
        self._codes = torch.zeros(rows, LAWS, candidates, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(rows, LAWS, candidates, device=device)
        self._next = torch.zeros(rows, dtype=torch.int64, device=device)
        self._passes = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self, slot: int) -> None:
        """Forget an image."""
        rows = slice(slot * (self._none + 1), (slot + 1) * (self._none + 1))
        self._above[rows] = self._stamp[rows] = UNSEEN

    def write(self, at: Tensor, above: Tensor, codes: Tensor, confidence: Tensor, order: Tensor) -> None:
        """Keep a pass's laws of positions at [B, N] (P: not kept), read below the codes above [B, N]: codes
        and log-confidences [B, N, K]. Of one position's laws that least in order [B, N], all different,
        counts as the newest; of more than LAWS the least are kept."""
        same = at.unsqueeze(2) == at.unsqueeze(1)
        rank = (same & (order.unsqueeze(1) < order.unsqueeze(2))).sum(dim=2)
        last = same.sum(dim=2).clamp(max=LAWS) - 1
        dropped = rank >= LAWS
        row = self._starts + at.masked_fill(dropped, self._none)
        # The best of a pass goes in last, so that later passes overwrite it last.
        place = (row * LAWS + (self._next[row] + last - rank) % LAWS).flatten()
        self._passes += 1
        stamp = (self._passes * LAWS - 1 - rank).masked_fill(dropped | (at == self._none), UNSEEN)
        self._stamp.view(-1).index_copy_(0, place, stamp.flatten())
        self._above.view(-1).index_copy_(0, place, above.flatten())
        self._codes.flatten(0, 1).index_copy_(0, place, codes.flatten(0, 1))
        self._confidence.flatten(0, 1).index_copy_(0, place, confidence.flatten(0, 1))
        self._next.index_add_(0, row.flatten(), torch.ones_like(place))

    def around(self, at: Tensor) -> Around:
        """The laws of positions at [B, L]."""
        rows = (self._starts + at).flatten()
        held = (self._above, self._stamp, self._codes, self._confidence)
        return Around(*(part.index_select(0, rows).unflatten(0, at.shape) for part in held))


@dataclass(frozen=True, slots=True)
class Around:
    """The laws of some positions: the codes above them, how new they are, and what they say."""

    above: Tensor  # [B, L, LAWS]
    stamp: Tensor  # [B, L, LAWS]
    codes: Tensor  # [B, L, LAWS, K]
    confidence: Tensor  # [B, L, LAWS, K]

    def newest(self) -> Tensor:
        """The best code [B, L] of each position's newest law."""
        return self._best(self.stamp)

    def below(self, code: Tensor) -> Tensor:
        """The best code [B, L] of the newest law read below code [B, L], or where there is none of the newest
        of all."""
        return self._best(self.stamp + SAME_CODE * (self.above == code[..., None]))

    def mixed(self, code: Tensor, width: int, num_codes: int) -> tuple[Tensor, Tensor]:
        """The best `width` of V = num_codes codes and their log-confidences [B, L, width] by a mixture of all
        laws, where that of one read below code [B, L], and of a newer one, has more weight; -inf where there
        is none."""
        latest = self.stamp.amax(dim=2, keepdim=True)
        weight = (self.stamp >= 0).float()
        for times, these in (
            (BELOW, self.above == code[..., None]),
            (LATE, self.stamp > latest - LAWS),
            (NEWEST, self.stamp == latest),
        ):
            weight = torch.add(weight, weight * these, alpha=times - 1)
        share = weight / weight.sum(dim=2, keepdim=True).clamp(min=1.0)
        said = (share[..., None] * self.confidence.exp()).flatten(2)
        mass = said.new_zeros(*code.shape, num_codes).scatter_add_(2, self.codes.flatten(2), said)
        most, codes = mass.topk(width, dim=2)
        return codes, most.clamp(max=1.0).log()

    def _best(self, stamp: Tensor) -> Tensor:
        which = stamp.argmax(dim=2, keepdim=True)
        return self.codes[..., 0].gather(2, which)[..., 0]
