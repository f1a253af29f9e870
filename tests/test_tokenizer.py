"""Parts of the embedded model's training: the tokenizer's codebook and losses, Muon's orthogonalisation."""

from __future__ import annotations

import pytest
import torch

from training.emoji.codebook import Codebook
from training.muon import orthogonalise


def test_a_rate_uses_fewer_codes_and_rate_zero_the_nearest() -> None:
    """The vectors lie around two points. At rate 0 all codes are in use, at rate 2 fewer."""
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(2000, 4, generator=rng) * 0.3
    vectors[:300] += 8
    book = Codebook(vectors[:16].clone())
    book.cluster(vectors, 6, rng)
    nearest, rated = book.assign(vectors, 0.0), book.assign(vectors, 2.0)
    assert torch.equal(nearest, torch.cdist(vectors, book.weight).argmin(1))
    assert len(nearest.unique()) == 16 and 2 <= len(rated.unique()) < 16


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
