"""The noise: distributed as it should be, independent across its keys, the same alone and in a batch."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from adt_tree.noise import ACCEPT, COUPLED, DRAFT, RESIDUAL, Noise, uniform

STREAMS = [COUPLED, DRAFT, ACCEPT, RESIDUAL]


def block(stream: int, first_seed: int = 0) -> torch.Tensor:
    """64 seeds x 32 positions x 48 codes."""
    seeds = torch.arange(64) + first_seed
    return uniform(seeds, torch.arange(32).expand(64, -1), 48, stream)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("first_seed", [0, 2**40, -(2**62)])
def test_uniforms_are_uniform(stream: int, first_seed: int) -> None:
    u = block(stream, first_seed).flatten()
    assert 0 < float(u.min()) < float(u.max()) < 1
    counts = torch.histc(u, 64, 0, 1)
    expected = len(u) / 64
    z = (((counts - expected) ** 2 / expected).sum() - 63) / math.sqrt(2 * 63)
    assert abs(float(z)) < 4
    assert float(u.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * len(u)))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_keys_are_uncorrelated(axis: int, lag: int) -> None:
    u = block(COUPLED) - 0.5
    size = u.shape[axis] - lag
    product = u.narrow(axis, 0, size) * u.narrow(axis, lag, size)
    assert abs(float(product.mean())) * math.sqrt(product.numel()) * 12 < 4


def test_streams_are_uncorrelated() -> None:
    for one, other in combinations(STREAMS, 2):
        product = (block(one) - 0.5) * (block(other) - 0.5)
        assert abs(float(product.mean())) * math.sqrt(product.numel()) * 12 < 4


def test_all_keys_differ() -> None:
    values = torch.cat([block(stream).flatten() for stream in STREAMS])
    assert len(values.unique()) == len(values)


def test_seed_and_position_do_not_trade() -> None:
    """Seed s at position p + 1 is not seed s + 1 at position p, nor is the next stream."""
    here = uniform(torch.tensor([5]), torch.tensor([[7]]), 4, COUPLED)
    for seed, position, stream in ((6, 6, COUPLED), (4, 8, COUPLED), (5, 7, DRAFT), (5, 8, COUPLED)):
        assert not torch.equal(here, uniform(torch.tensor([seed]), torch.tensor([[position]]), 4, stream))


def test_gumbel_moments() -> None:
    noise = Noise(48, silent=False)
    g = noise.gumbel(torch.arange(64), torch.arange(64).expand(64, -1)).double().flatten()
    error = math.pi / math.sqrt(6 * len(g))
    assert float(g.mean()) == pytest.approx(0.5772156649, abs=4 * error)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert bool(g.isfinite().all())


def test_argmax_with_gumbel_noise_draws_from_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    g = Noise(4, silent=False).gumbel(torch.arange(40_000), torch.full((40_000, 1), 3))[:, 0]
    counts = torch.bincount((p.log() + g).argmax(-1), minlength=4)
    z = (counts - 40_000 * p) / (40_000 * p * (1 - p)).sqrt()
    assert float(z.abs().max()) < 4


def test_the_same_alone_and_in_a_batch() -> None:
    noise = Noise(16, silent=False)
    seeds = torch.tensor([3, 1 << 45, -9])
    positions = torch.tensor([[0, 5, 2], [9, 9, 1], [1023, 7, 0]])
    together = noise.gumbel(seeds, positions)
    for image in range(3):
        for place in range(3):
            one = noise.gumbel(seeds[image : image + 1], positions[image : image + 1, place : place + 1])
            assert torch.equal(one[0, 0], together[image, place])
    assert torch.equal(Noise(8, silent=False).gumbel(seeds, positions), together[..., :8])


@pytest.mark.parametrize("silent", [False, True])
def test_a_table_holds_the_noise_of_its_slots(silent: bool) -> None:
    """Bit for bit what is drawn on the spot, in slots that images take in turn; behind an image its last."""
    noise, seeds = Noise(6, silent), [7, -3, 1 << 40]
    table = noise.table(2, 37, torch.device("cpu"))
    table.begin(0, seeds[0])
    table.begin(1, seeds[1])
    positions = torch.tensor([[0, 16, 36, 36], [5, 31, 15, 32]])
    assert torch.equal(table.at(positions), noise.gumbel(torch.tensor(seeds[:2]), positions))
    table.begin(0, seeds[2])
    assert torch.equal(table.at(positions), noise.gumbel(torch.tensor([seeds[2], seeds[1]]), positions))
    assert torch.equal(table.at(positions[:, -1:] + 9)[0], table.at(positions)[0, -1:])


def mix(x: int) -> int:
    """The splitmix64 finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize(
    ("seed", "position", "stream"), [(0, 0, COUPLED), (42, 17, DRAFT), (2**40, 1023, ACCEPT)]
)
def test_values_are_those_of_the_definition(seed: int, position: int, stream: int) -> None:
    """A seed gives the same image on every machine and in every version."""
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed * golden + stream) % 2**64) + position * golden) % 2**64)
    expected = [((mix((key + (code + 1) * golden) % 2**64) >> 12) + 0.5) * 2.0**-52 for code in range(5)]
    assert uniform(torch.tensor([seed]), torch.tensor([[position]]), 5, stream)[0, 0].tolist() == expected


def test_silence() -> None:
    g = Noise(5, silent=True).gumbel(torch.arange(2), torch.zeros(2, 3, dtype=torch.int64))
    assert g.shape == (2, 3, 5)
    assert not bool(g.any())
