"""The losses of the tokenizer: on pixels, on features of a published network, on the vectors of flat cells.

Dimensions: B pictures of P x P pixels, h x w cells of P/h x P/w pixels, E numbers per latent vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.metrics.networks import efficientnet

FLAT = 0.05  # pixels of a flat cell, in [-1, 1], differ by less than this
WHITE = 0.96  # pixels of a white cell, in [-1, 1], are above this, 250 of 255


class Perceptual(nn.Module):
    """A perceptual loss: the squared distance between early EfficientNet-Lite0 features (strides 2, 4, 8)."""

    LAYERS = (0, 2, 4)

    def __init__(self) -> None:
        super().__init__()
        net, _ = efficientnet()
        self.stem = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
        self.blocks = nn.ModuleList(net._blocks[: self.LAYERS[-1] + 1])
        self.requires_grad_(False).eval()

    def features(self, images: Tensor) -> list[Tensor]:
        """Returns feature maps of unit norm per position, for images [B, 3, P, P] in [-1, 1]."""
        hidden, maps = self.stem(images), []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index in self.LAYERS:
                maps.append(F.normalize(hidden, dim=1, eps=1e-3))
        return maps

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean squared distance per position, summed over the layers: a scalar."""
        with torch.no_grad():
            expected = self.features(targets)
        pairs = zip(self.features(images), expected, strict=True)
        return sum(((a - b).square().sum(1).mean() for a, b in pairs), images.new_zeros(()))


def pixel_error(images: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of |error| + error^2 over pixels: a scalar.

    Pixels whiter than white or blacker than black cost nothing, because decoding clamps them.
    """
    error = images - targets
    clamped = ((targets > 0.99) & (error > 0)) | ((targets < -0.99) & (error < 0))
    error = error.masked_fill(clamped, 0.0)
    return error.abs().mean() + error.square().mean()


def cell_range(images: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Returns the least and the greatest value [B, 3, h, w] of each colour in cells of side x side pixels."""
    return -F.max_pool2d(-images, side), F.max_pool2d(images, side)


def white_cells(images: Tensor, side: int) -> Tensor:
    """Returns which cells are white: bool [B, h, w], for images [B, 3, P, P] in [-1, 1]."""
    return (cell_range(images, side)[0] > WHITE).all(1)


def flatness(vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two losses on the vectors [B, h, w, E] of cells that look the same, as scalars.

    ground: the mean squared distance of white cells' vectors from their mean. apart: that between the vectors
    of neighbouring flat cells of one colour. Both are means over the numbers of a vector, too.
    """
    low, high = cell_range(images, images.shape[-1] // vectors.shape[1])
    white = vectors[(low > WHITE).all(1)]
    ground = (white - white.mean(0).detach()).square().mean() if len(white) else vectors.new_zeros(())
    differences = []
    for dim in (1, 2):
        count = vectors.shape[dim] - 1
        least = torch.minimum(low.narrow(dim + 1, 0, count), low.narrow(dim + 1, 1, count))
        most = torch.maximum(high.narrow(dim + 1, 0, count), high.narrow(dim + 1, 1, count))
        same = (most - least < FLAT).all(1)
        differences.append((vectors.narrow(dim, 0, count) - vectors.narrow(dim, 1, count))[same])
    apart = torch.cat(differences)
    return ground, apart.square().mean() if len(apart) else vectors.new_zeros(())
