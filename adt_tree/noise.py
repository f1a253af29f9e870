"""Counter-based noise: a pure function of (seed, stream, position, code), the same on every device and in
any batch.

Integer mixing (the splitmix64 finaliser) is exact everywhere; logarithms are taken in fp64 and rounded once
to fp32. Dimensions: B images, N positions, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Streams are independent: what a verdict draws must not be what a draft was drawn with.
COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """Uniforms in (0, 1), fp64 [B, N, count], keyed by seeds [B], positions [B, N] and the stream."""
    key = _mix(seeds * _GOLDEN + stream)[:, None]
    key = _mix(key + positions * _GOLDEN)[..., None]
    counter = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    bits = (_mix(key + counter) >> 12) & (2**52 - 1)  # with the half, 53 bits: exact in fp64, so never 0 or 1
    return (bits.double() + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise over V codes on one stream; silent (all zero) at temperature 0, where the argmax needs
    none."""

    num_codes: int
    silent: bool
    stream: int = COUPLED

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """G = -log(-log U), fp32 [B, N, V], for seeds [B] and positions [B, N]."""
        if self.silent:
            return torch.zeros((), device=seeds.device).expand(*positions.shape, self.num_codes)
        return -torch.log(-torch.log(uniform(seeds, positions, self.num_codes, self.stream))).float()
