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

ROWS = 32  # drawn at a time

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

    def table(self, slots: int, positions: int, device: torch.device) -> NoiseTable:
        """Room for the noise of `slots` images of so many positions."""
        return NoiseTable(self, slots, positions, device)


class NoiseTable:
    """The Gumbel noise of the images in flight, drawn once per image: tree after tree asks for that of
    the same positions.

    State: fp32 [B, positions, V], nothing where the noise is silent.
    """

    def __init__(self, noise: Noise, slots: int, positions: int, device: torch.device) -> None:
        """Nothing is drawn before begin()."""
        self._noise, self._positions = noise, positions
        rows = 0 if noise.silent else slots * positions
        self._drawn = torch.zeros(rows, noise.num_codes, device=device)
        self._starts = torch.arange(slots, device=device)[:, None] * positions

    def begin(self, slot: int, seed: int) -> None:
        """An image of that seed takes the slot."""
        if self._noise.silent:
            return
        device = self._drawn.device
        start, seeds = slot * self._positions, torch.full((1,), seed, device=device)
        # Some rows at a time: what is drawn passes through fp64 and integers of as many bytes.
        for at in torch.arange(self._positions, device=device).split(ROWS):
            self._drawn[start : start + len(at)] = self._noise.gumbel(seeds, at[None])[0]
            start += len(at)

    def below(self, positions: Tensor, levels: int) -> Tensor:
        """G [B, levels, V] at positions [B] and those behind them."""
        return self.at(positions[:, None] + torch.arange(levels, device=positions.device))

    def at(self, positions: Tensor) -> Tensor:
        """G [B, N, V] at positions [B, N] of the slots' images; behind an image that of its last."""
        if self._noise.silent:
            return self._noise.gumbel(self._starts[:, 0], positions)
        rows = self._starts + positions.clamp(max=self._positions - 1)
        return self._drawn.index_select(0, rows.flatten()).view(*positions.shape, -1)
