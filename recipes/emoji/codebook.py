"""Chooses codes for latent vectors by distance and rate, in training and after it.

Dimensions: N vectors of E numbers, K codes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DECAY = 0.99
DEAD, REVIVED = 0.02, 0.2  # a code whose count falls below DEAD is moved and gets the count REVIVED


class Codebook(nn.Module):
    """The quantiser's embedding [K, E] with moving averages of how often each code is chosen.

    The embedding is a parameter of the quantiser; this module's state holds the averages alone.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("count", torch.ones(len(weight), device=weight.device))
        self.register_buffer("total", weight.clone())

    def assign(self, vectors: Tensor, rate: float) -> Tensor:
        """Returns the codes [...] of vectors [..., E] that minimise squared distance - rate * log(share).

        Share is a code's relative frequency. A rare code is chosen only if it is closer than a common one by
        this penalty, so that cells that look the same get the same code. With rate 0 the nearest code is
        chosen.
        """
        penalty = -rate * (self.count / self.count.sum()).clamp(min=1e-6).log()
        offset = self.weight.square().sum(1) + penalty
        parts = [
            torch.addmm(offset, part, self.weight.T, alpha=-2).argmin(1)
            for part in vectors.flatten(0, -2).split(8192)
        ]
        return torch.cat(parts).view(vectors.shape[:-1])

    @torch.no_grad()
    def cluster(self, vectors: Tensor, rounds: int, rng: torch.Generator) -> None:
        """Moves the codes by rounds of Lloyd's algorithm on vectors [N, E]. A code that no vector chose is
        replaced by a random vector."""
        num = len(self.weight)
        for _ in range(rounds):
            codes = self.assign(vectors, rate=0.0)
            count = torch.bincount(codes, minlength=num).float()
            total = torch.zeros_like(self.weight).index_add_(0, codes, vectors)
            empty = count == 0
            self.weight.copy_(total / count.clamp(min=1)[:, None])
            random = vectors[torch.randint(len(vectors), (int(empty.sum()),), generator=rng)]
            self.weight[empty] = random
            # Scaled to the vectors of a training step (8 pictures), as follow() counts. An empty code gets
            # 0.05, which is above DEAD.
            self.count = count * (2048 / len(vectors)) + 0.05
        self.total = self.weight * self.count[:, None]

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, rng: torch.Generator) -> None:
        """Updates the moving averages, and the codes with them, from vectors [N, E] and their codes [N].

        A code that is hardly chosen any more moves onto a vector, sampled in proportion to its squared
        distance from the code it chose.
        """
        num = len(self.weight)
        self.count.mul_(DECAY).add_(torch.bincount(codes, minlength=num).float(), alpha=1 - DECAY)
        total = torch.zeros_like(self.total).index_add_(0, codes, vectors)
        self.total.mul_(DECAY).add_(total, alpha=1 - DECAY)
        dead = self.count < DEAD
        if dead.any():
            error = (vectors - self.weight[codes]).square().sum(1) + 1e-6
            rows = torch.multinomial(error.cpu(), int(dead.sum()), replacement=True, generator=rng)
            self.count[dead], self.total[dead] = REVIVED, vectors[rows] * REVIVED
        self.weight.copy_(self.total / self.count[:, None])
