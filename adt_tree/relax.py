"""LANTERN's relaxed acceptance (2410.03355, ++ 2502.06352): mass borrowed from the nearest codebook latents.

For a drafted code x: B = its k nearest codes, self excluded, in ascending latent distance; S_j =
p(b_1)+...+p(b_j). Admissible: S_j <= delta (delta <= 1: a bound on total variation) or S_j <= (delta - 1)
p(x) (delta > 1, LANTERN++). A(x) = {x, b_1 .. b_j*} with j* the largest admissible index. Dimensions: V
codes, K neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.errors import UserError


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The neighbour table, how many neighbours k count, and the budget delta."""

    table: Tensor  # [V, at least k + 1] int64, ascending distance, self excluded
    k: int
    delta: float

    def aggregate(self, p: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each drafted code may borrow under the distribution it is tested against.

        p [..., V] fp32, codes [...] int64. Returns neighbours [..., K], admissible [..., K] bool (a prefix)
        and the mass S_j* [...]. K is k, but one column that is never admissible stands for k = 0.
        """
        near = self.table[codes][..., : max(self.k, 1)]
        mass = p.gather(-1, near).cumsum(dim=-1)
        if self.delta <= 1:
            admissible = mass <= self.delta
        else:
            admissible = mass <= (self.delta - 1) * p.gather(-1, codes[..., None])
        if self.k == 0 or self.delta == 0:  # the exact rule: sets without mass are not merged either
            admissible = torch.zeros_like(admissible)
        return near, admissible, mass.masked_fill(~admissible, 0).amax(dim=-1)


def nearest_table(codebook: Tensor, width: int) -> Tensor:
    """[V, width] int64: every code's nearest others by raw L2 distance, ascending, self excluded.

    codebook [V, C]; distances in fp64, so that near-ties order the same on every device. UserError if
    width > V - 1.
    """
    codes = codebook.shape[0]
    if not 0 <= width < codes:
        raise UserError(f"lantern_k {width}: a codebook of {codes} codes has {codes - 1} neighbours each")
    points = codebook.double()
    rows: list[Tensor] = []
    for block in points.split(1024):  # bounded memory for 16,384 codes
        distance = torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(len(block), device=points.device)
        distance[own, own + 1024 * len(rows)] = float("inf")
        rows.append(distance.topk(width, dim=1, largest=False, sorted=True).indices)
    return torch.cat(rows)
