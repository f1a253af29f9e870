"""VGG-16's second hidden layer, before its rectifier, as precision and recall use it.

Keys of torchvision's state dict: features.N.*, classifier.0.*, classifier.3.*. Layers and widths come from
it: two layers after a convolution stands the next one, three where a max pool lies between.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.metrics.tensors import checked
from models.weights import read_weights

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VGG:
    """The network up to that layer."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """path: the state dict. CheckpointError if it is another network's."""
        weights = read_weights(path)
        self.digest = weights.digest()
        convolutions = (name for name in weights if name.startswith("features.") and name.endswith("weight"))
        numbers = sorted(int(name.split(".")[1]) for name in convolutions)
        with checked(path, "VGG-16 state dict of torchvision"):
            names = [f"features.{number}" for number in numbers] + ["classifier.0", "classifier.3"]
            parts = [
                [weights[f"{name}.{kind}"].to(device, torch.float32) for kind in ("weight", "bias")]
                for name in names
            ]
            *self._convolutions, self._first, self._second = parts
            gaps = [after - number for number, after in pairwise(numbers)]
            self._pooled = [*(gap > 2 for gap in gaps), True]
            cells = self._first[0].shape[1] / self._convolutions[-1][0].shape[0]
            self._side = round(cells**0.5)
            if self._side**2 != cells:
                raise ValueError(f"classifier.0 takes {self._first[0].shape[1]} values")

    def features(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, 224, 224] -> features [B, D]."""
        hidden = pixels
        for (weight, bias), pooled in zip(self._convolutions, self._pooled, strict=True):
            hidden = F.conv2d(hidden, weight, bias, padding=1).relu()
            hidden = F.max_pool2d(hidden, 2) if pooled else hidden
        hidden = F.adaptive_avg_pool2d(hidden, self._side).flatten(1)
        return F.linear(F.linear(hidden, *self._first).relu(), *self._second)
