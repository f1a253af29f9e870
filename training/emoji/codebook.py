"""Codes of latent vectors under a rate: the one way from pictures to codes, in training and after it.

N vectors of E numbers, K codes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DECAY = 0.99
DEAD, REVIVED = 0.02, 0.2  # weight below which a code moves, and the weight it starts anew with


class Codebook(nn.Module):
    """The quantiser's embedding [K, E] with moving averages of how often each code is chosen."""

    def __init__(self, weight: Tensor) -> None:
        """weight: part of the quantiser, not of this state."""
        super().__init__()
        self.weight = weight
        self.register_buffer("count", torch.ones(len(weight), device=weight.device))
        self.register_buffer("total", weight.clone())

    def assign(self, vectors: Tensor, rate: float) -> Tensor:
        """Codes [...] of vectors [..., E]: least squared distance - rate * log(share); rate 0: the nearest.

        A rare code must save more distance than a common one, so that cells that look the same share a code.
        """
        penalty = -rate * (self.count / self.count.sum()).clamp(min=1e-6).log()
        offset = self.weight.square().sum(1) + penalty
        parts = [
            torch.addmm(offset, part, self.weight.T, alpha=-2).argmin(1)
            for part in vectors.flatten(0, -2).split(8192)
        ]
        return torch.cat(parts).view(vectors.shape[:-1])

    @torch.no_grad()
    def cluster(self, vectors: Tensor, rounds: int, rate: float, rng: torch.Generator) -> None:
        """Lloyd's rounds on vectors [N, E] from the codes; empty ones are redrawn, or (rate) stay."""
        num = len(self.weight)
        for _ in range(rounds):
            codes = self.assign(vectors, rate)
            count = torch.bincount(codes, minlength=num).float()
            total = torch.zeros_like(self.weight).index_add_(0, codes, vectors)
            empty = count == 0
            kept = self.weight[empty]
            self.weight.copy_(total / count.clamp(min=1)[:, None])
            fresh = vectors[torch.randint(len(vectors), (int(empty.sum()),), generator=rng)]
            self.weight[empty] = kept if rate else fresh
            self.count = count * (2048 / len(vectors)) + 0.05
        self.total = self.weight * self.count[:, None]

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, rng: torch.Generator) -> None:
        """One moving-average update from vectors [N, E] and their codes [N].

        A code of little weight moves onto a vector drawn by its squared distance from its own code.
        """
        num = len(self.weight)
        self.count.mul_(DECAY).add_(torch.bincount(codes, minlength=num).float(), alpha=1 - DECAY)
        total = torch.zeros_like(self.total).index_add_(0, codes, vectors)
        self.total.mul_(DECAY).add_(total, alpha=1 - DECAY)
        dead = self.count < DEAD
        if dead.any():
            error = (vectors - self.weight[codes]).square().sum(1) + 1e-6
            drawn = torch.multinomial(error.cpu(), int(dead.sum()), replacement=True, generator=rng)
            self.count[dead], self.total[dead] = REVIVED, vectors[drawn] * REVIVED
        self.weight.copy_(self.total / self.count[:, None])
