"""LANTERN's relaxed acceptance (2410.03355; LANTERN++ 2502.06352): a code borrows its neighbours'
probability.

The neighbours b_1, b_2, ... of a drafted code x are the k codes nearest to it in the codebook, without x
itself, nearest first, and S_j = p(b_1) + ... + p(b_j). An index j is admissible if S_j <= delta (delta <= 1:
a bound on total variation), or if S_j <= (delta - 1) p(x) (delta > 1: LANTERN++). With j* the largest
admissible index, A(x) = {x, b_1, ..., b_j*}. Dimensions: V codes, K neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.errors import UserError


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The settings of relaxed acceptance on one codebook."""

    table: Tensor  # [V, at least k + 1] int64: the neighbours of every code, nearest first
    k: int  # number of neighbours that count
    delta: float  # bound on the borrowed probability

    def aggregate(self, p: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the neighbours [..., K] int64 of drafted codes [...], a mask [..., K] bool that is true for
        the first j*, the admissible ones, and their mass S_j* [...].

        p [..., V] fp32: the distribution that each code is tested against. K is k, but at least 1: with k = 0
        there is one column, which is never admissible.
        """
        near = self.table[codes][..., : max(self.k, 1)]
        mass = p.gather(-1, near).cumsum(dim=-1)
        if self.delta <= 1:
            admissible = mass <= self.delta
        else:
            admissible = mass <= (self.delta - 1) * p.gather(-1, codes[..., None])
        if self.k == 0 or self.delta == 0:  # the exact rule, which does not merge neighbours of p = 0 either
            admissible = torch.zeros_like(admissible)
        return near, admissible, mass.masked_fill(~admissible, 0).amax(dim=-1)


def nearest_table(codebook: Tensor, width: int) -> Tensor:
    """Returns [V, width] int64: the `width` nearest other codes of every code, nearest first.

    The distance is L2 between latents, codebook [V, C], in fp64, so that near-ties have the same order on
    every device. UserError if width > V - 1.
    """
    codes = codebook.shape[0]
    if not 0 <= width < codes:
        raise UserError(f"{width} neighbours: each of the {codes} codes has only {codes - 1}; give less")
    points = codebook.double()
    rows: list[Tensor] = []
    for block in points.split(1024):  # bounded memory for 16,384 codes
        distance = torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist")
        row = torch.arange(len(block), device=points.device)
        distance[row, row + 1024 * len(rows)] = float("inf")  # a code is not its neighbour
        rows.append(distance.topk(width, dim=1, largest=False, sorted=True).indices)
    return torch.cat(rows)
