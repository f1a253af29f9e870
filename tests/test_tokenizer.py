"""The rate rule and the losses of the embedded model's tokenizer."""

from __future__ import annotations

import torch

from training.emoji import losses
from training.emoji.codebook import Codebook


def test_rate_zero_is_the_nearest_code_and_a_rate_shrinks_the_entropy() -> None:
    """Clustering noise around two points: a rate ends with fewer codes in use; without it all stay in use."""
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


def test_pixels_beyond_white_and_black_are_free() -> None:
    """Overshoot where decoding clamps costs nothing; undershoot does."""
    targets = torch.tensor([1.0, 1.0, -1.0, 0.0])
    assert losses.pixel_error(torch.tensor([1.7, 1.0, -3.0, 0.0]), targets) == 0
    assert losses.pixel_error(torch.tensor([0.7, 1.0, -1.0, 0.0]), targets) > 0


def test_flat_cells_of_one_colour_are_drawn_together() -> None:
    """No loss for equal vectors of white cells and of one grey area; loss for others; none where colours
    differ."""
    images = torch.ones(1, 3, 16, 16)
    images[:, :, :, 8:] = 0.2
    assert losses.white_cells(images, 4)[0, :, :2].all() and not losses.white_cells(images, 4)[0, :, 2:].any()
    vectors = torch.zeros(1, 4, 4, 2)
    vectors[:, :, 2:] = 5.0
    assert [loss.item() for loss in losses.flatness(vectors, images)] == [0, 0]
    vectors[0, 0, 0] = 1.0
    ground, apart = losses.flatness(vectors, images)
    assert ground > 0 and apart > 0
