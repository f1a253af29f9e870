"""Counter-based noise: a pure function of (seed, stream, position, code), on every device and in any batch.

The integer mixing is the finaliser of splitmix64 and exact everywhere. Logarithms are taken in fp64 and
rounded once to fp32. Dimensions: B images, N positions, V codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.grid import Grid

# Independent streams: a verdict must not use the random numbers with which a draft was sampled.
COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)

# The constants of splitmix64 as int64. The masks in _mix() clear the sign bits that >> shifts in.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    """Mixes int64 numbers: a bijection in which every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """Returns uniforms in (0, 1), fp64 [B, N, count], keyed by seeds [B], positions [B, N] and the stream."""
    key = _mix(seeds * _GOLDEN + stream)[:, None]
    key = _mix(key + positions * _GOLDEN)[..., None]
    counter = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    bits = (_mix(key + counter) >> 12) & (2**52 - 1)
    # A number of 52 bits plus a half has 53 bits, which fp64 holds exactly. So the result is never 0 or 1.
    return (bits.double() + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise over V codes on one stream. It is silent (all zero) at temperature 0."""

    num_codes: int
    silent: bool
    stream: int = COUPLED

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Returns G = -log(-log U), fp32 [B, N, V], for seeds [B] and positions [B, N]."""
        if self.silent:
            zero = torch.zeros((), dtype=torch.float32, device=seeds.device)
            return zero.expand(*positions.shape, self.num_codes)
        return -torch.log(-torch.log(uniform(seeds, positions, self.num_codes, self.stream))).float()


def row_ends(grid: Grid, device: torch.device) -> Tensor | None:
    """Returns which positions are row ends, [P + 1] bool; the last entry, false, is for all positions outside
    the image. None for a grid without row ends, so that its steps contain no operation for them."""
    if grid.length == grid.size:
        return None
    return torch.tensor([*map(grid.is_row_end, range(grid.length)), False], device=device)


@dataclass(frozen=True, slots=True)
class PositionNoise:
    """The noise of N positions of every image, and at which of them the model has no choice."""

    gumbel: Tensor  # [B, N, V] fp32
    forced: Tensor | None  # [B, N] bool: the position is a row end; None for grids without row ends

    def level(self, number: int) -> PositionNoise:
        """Returns the noise of one of the N positions, [B, 1, ...]."""
        at = slice(number, number + 1)
        return PositionNoise(self.gumbel[:, at], None if self.forced is None else self.forced[:, at])
