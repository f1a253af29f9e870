"""The LAION aesthetic head: a linear net on the unit CLIP embedding of an image.

Keys of sac+logos+ava1-l14-linearMSE (improved-aesthetic-predictor): layers.N.weight, layers.N.bias, linear
layers with dropouts between them and no rectifiers; widths come from the tensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.metrics.tensors import checked
from models.weights import read_weights


class Aesthetic:
    """The head."""

    def __init__(self, path: Path, width: int, device: torch.device) -> None:
        """width: of the embedding it is to read. CheckpointError if the state dict is of something else."""
        weights = read_weights(path)
        self.digest = weights.digest()
        numbers = sorted(int(name.split(".")[1]) for name in weights if name.endswith(".weight"))
        with checked(path, "LAION aesthetic head"):
            self._layers = [
                [weights[f"layers.{number}.{kind}"].to(device, torch.float32) for kind in ("weight", "bias")]
                for number in numbers
            ]
            reads = self._layers[0][0].shape[1]
            if reads != width:
                raise ValueError(f"it reads {reads} values, the CLIP model gives {width}")

    def scores(self, embeddings: Tensor) -> Tensor:
        """CLIP embeddings [B, D] of any length -> scores [B], about 1 to 10."""
        hidden = F.normalize(embeddings, dim=1)
        for weight, bias in self._layers:
            hidden = F.linear(hidden, weight, bias)
        return hidden[:, 0]
