"""Inception v3 of 2015-12-05 as FID and Inception Score use it, over the PyTorch port's state dict.

Keys of pt_inception-2015-12-05 (pytorch-fid, torch-fidelity): UNIT.conv.weight, UNIT.bn.*, fc.*. Widths come
from the tensors; the port's departures from torchvision's net (average pools that do not count their padding,
a max pool in the last block) are here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.metrics.tensors import checked
from models.weights import Weights, read_weights

SIDE = 299  # pixels
EPS = 1e-3  # of its batch norms
UNPADDED = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_4a_3x3")
TOWERS = {  # block -> towers of units, one after the other; / splits a unit in two whose outputs are joined
    **dict.fromkeys(
        ("Mixed_5b", "Mixed_5c", "Mixed_5d"),
        ("1x1", "5x5_1 5x5_2", "3x3dbl_1 3x3dbl_2 3x3dbl_3"),
    ),
    "Mixed_6a": ("3x3", "3x3dbl_1 3x3dbl_2 3x3dbl_3"),
    **dict.fromkeys(
        ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
        ("1x1", "7x7_1 7x7_2 7x7_3", "7x7dbl_1 7x7dbl_2 7x7dbl_3 7x7dbl_4 7x7dbl_5"),
    ),
    "Mixed_7a": ("3x3_1 3x3_2", "7x7x3_1 7x7x3_2 7x7x3_3 7x7x3_4"),
    **dict.fromkeys(
        ("Mixed_7b", "Mixed_7c"),
        ("1x1", "3x3_1 3x3_2a/3x3_2b", "3x3dbl_1 3x3dbl_2 3x3dbl_3a/3x3dbl_3b"),
    ),
}
LAST = "Mixed_7c"  # pools by maximum
HALVING = ("Mixed_6a", "Mixed_7a")  # blocks whose towers end in stride 2, beside a max pool of stride 2


class Inception:
    """The network, batch norms folded into its convolutions."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """path: the state dict. CheckpointError if it is another network's."""
        weights = read_weights(path)
        self.digest = weights.digest()
        with checked(path, "Inception state dict (pt_inception-2015-12-05)"):
            self._units = {name: _fold(weights, name, device) for name in _units()}
            self._fc = weights["fc.weight"].to(device, torch.float32)

    def features(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, 299, 299] of 0 to 255 -> pooled features [B, D]."""
        hidden = (pixels - 128) / 128
        for name, stride in (("Conv2d_1a_3x3", 2), ("Conv2d_2a_3x3", 1), ("Conv2d_2b_3x3", 1)):
            hidden = self._unit(hidden, name, stride)
        hidden = F.max_pool2d(hidden, 3, 2)
        for name in ("Conv2d_3b_1x1", "Conv2d_4a_3x3"):
            hidden = self._unit(hidden, name)
        hidden = F.max_pool2d(hidden, 3, 2)
        for block in TOWERS:
            hidden = self._block(hidden, block)
        return hidden.mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Class scores [B, C] without bias, as Inception Score takes them."""
        return features @ self._fc.T

    def _block(self, hidden: Tensor, block: str) -> Tensor:
        halving, outputs = block in HALVING, []
        for tower in TOWERS[block]:
            units, part = tower.split(), hidden
            for unit in units:
                stride = 2 if halving and unit == units[-1] else 1
                halves = [self._unit(part, f"{block}.branch{half}", stride) for half in unit.split("/")]
                part = torch.cat(halves, 1)
            outputs.append(part)
        if halving:
            outputs.append(F.max_pool2d(hidden, 3, 2))
        else:
            pooled = (
                F.max_pool2d(hidden, 3, 1, 1)
                if block == LAST
                else F.avg_pool2d(hidden, 3, 1, 1, count_include_pad=False)
            )
            outputs.append(self._unit(pooled, f"{block}.branch_pool"))
        return torch.cat(outputs, 1)

    def _unit(self, hidden: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = self._units[name]
        padded = stride == 1 and name not in UNPADDED
        padding = (weight.shape[2] // 2, weight.shape[3] // 2) if padded else (0, 0)
        return F.conv2d(hidden, weight, bias, stride, padding).relu()


def _units() -> list[str]:
    """Every unit's name."""
    names = [*UNPADDED, "Conv2d_2b_3x3", "Conv2d_3b_1x1"]
    for block, towers in TOWERS.items():
        units = " ".join(towers).replace("/", " ").split()
        names += [f"{block}.branch{unit}" for unit in units]
        names += [] if block in HALVING else [f"{block}.branch_pool"]
    return names


def _fold(weights: Weights, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """A convolution and the batch norm behind it as one convolution."""
    norm = {
        part: weights[f"{name}.bn.{part}"].double()
        for part in ("weight", "bias", "running_mean", "running_var")
    }
    scale = norm["weight"] / (norm["running_var"] + EPS).sqrt()
    kernel = weights[f"{name}.conv.weight"].double() * scale.view(-1, 1, 1, 1)
    shift = norm["bias"] - norm["running_mean"] * scale
    return kernel.to(device, torch.float32), shift.to(device, torch.float32)
