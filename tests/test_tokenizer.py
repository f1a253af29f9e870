"""Parts of the embedded model's training: the tokenizer's codebook and losses, Muon's orthogonalisation."""

from __future__ import annotations

import pytest
import torch

from training.emoji.codebook import Codebook
from training.muon import orthogonalise


def test_a_rate_uses_fewer_codes_and_rate_zero_the_nearest() -> None:
    """The vectors lie around two points. At rate 0 all codes stay in use, at rate 2 only a few."""
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(2000, 4, generator=rng) * 0.3
    vectors[:300] += 8
    used = []
    for rate in (0.0, 2.0):
        book = Codebook(vectors[:16].clone())
        book.cluster(vectors, 6, rate, rng)
        codes = book.assign(vectors, rate)
        used.append(len(codes.unique()))
        if rate == 0.0:
            assert torch.equal(codes, torch.cdist(vectors, book.weight).argmin(1))
    assert used[0] == 16 and 2 <= used[1] < 8


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 8, 20), (2, 20, 8)])
def test_orthogonalise_sets_singular_values_to_about_one(shape: tuple[int, int, int]) -> None:
    """It leaves the singular vectors as they are."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = orthogonalise(matrices, rounds=5)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert (u.mT @ result @ v.mT).diagonal(dim1=1, dim2=2).min() > 0.3
