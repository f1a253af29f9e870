"""The noise has its distribution, is independent for different keys, and does not depend on the batch."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch

from adt_tree.noise import ACCEPT, COUPLED, DRAFT, RESIDUAL, Noise, uniform
from tests.support.tabular import chi_square

STREAMS = [COUPLED, DRAFT, ACCEPT, RESIDUAL]


def block(stream: int, first_seed: int = 0) -> torch.Tensor:
    """Returns noise for 64 seeds, 32 positions and 48 codes."""
    seeds = torch.arange(64) + first_seed
    return uniform(seeds, torch.arange(32).expand(64, -1), 48, stream)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("first_seed", [0, 2**40, -(2**62)])
def test_uniforms_are_uniform(stream: int, first_seed: int) -> None:
    u = block(stream, first_seed).flatten()
    assert 0 < float(u.min()) < float(u.max()) < 1
    expected = torch.full((64,), len(u) / 64, dtype=torch.float64)
    assert abs(chi_square(torch.histc(u, 64, 0, 1), expected)) < 4
    assert float(u.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * len(u)))


def test_keys_are_uncorrelated() -> None:
    """Noise is compared with its neighbours along every axis, and with that of other streams."""
    u = block(COUPLED)
    pairs = [(block(one), block(other)) for one, other in combinations(STREAMS, 2)]
    for axis, lag in product(range(3), (1, 2, 7)):
        size = u.shape[axis] - lag
        pairs.append((u.narrow(axis, 0, size), u.narrow(axis, lag, size)))
    for one, other in pairs:
        mean = float(((one - 0.5) * (other - 0.5)).mean())
        assert abs(mean) * math.sqrt(one.numel()) * 12 < 4


def test_gumbel_moments() -> None:
    noise = Noise(48, silent=False)
    g = noise.gumbel(torch.arange(64), torch.arange(64).expand(64, -1)).double().flatten()
    error = math.pi / math.sqrt(6 * len(g))
    assert float(g.mean()) == pytest.approx(0.5772156649, abs=4 * error)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert bool(g.isfinite().all())


def test_argmax_with_gumbel_noise_samples_from_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    g = Noise(4, silent=False).gumbel(torch.arange(40_000), torch.full((40_000, 1), 3))[:, 0]
    counts = torch.bincount((p.log() + g).argmax(-1), minlength=4)
    z = (counts - 40_000 * p) / (40_000 * p * (1 - p)).sqrt()
    assert float(z.abs().max()) < 4


def mix(x: int) -> int:
    """Computes the finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("stream", STREAMS)
def test_values_are_those_of_the_definition(stream: int) -> None:
    """A seed gives the same image on every machine, in every version, and in any batch."""
    golden, seeds, positions = 0x9E3779B97F4A7C15, [0, 2**40, -9], [[0, 17], [9, 1023], [7, 7]]
    uniforms = uniform(torch.tensor(seeds), torch.tensor(positions), 5, stream)
    for seed, row, values in zip(seeds, positions, uniforms.tolist(), strict=True):
        for position, numbers in zip(row, values, strict=True):
            key = mix((mix((seed * golden + stream) % 2**64) + position * golden) % 2**64)
            bits = [mix((key + code * golden) % 2**64) >> 12 for code in range(1, 6)]
            assert numbers == [(number + 0.5) * 2.0**-52 for number in bits]
