"""The decoder of nvidia/Cosmos-1.0-Tokenizer-DV8x16x16, which turns SimpleAR's codes into pixels.

It is published as TorchScript, which is code: opening decoder.jit may run whatever its author wrote. So it is
opened only where the user says that he trusts it. The tokenizer is made for video; an image is one frame.

The codes are those of finite scalar quantisation (arXiv:2309.15505): code k holds one of LEVELS[n] values for
each of its six numbers, as the digits of k, the first one lowest.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adt_tree.errors import UserError
from models.checkpoint.files import reading
from models.codecs.vq import VQConfig

LEVELS = (8, 8, 8, 5, 5, 5)
REMEDY = "give decoder.jit of Cosmos-1.0-Tokenizer-DV8x16x16"


def code_vectors(device: torch.device) -> Tensor:
    """Returns the code vectors [64000, 6] fp32. Their numbers lie evenly in [-1, 1], -1 included."""
    levels = torch.tensor(LEVELS, device=device)
    basis = torch.tensor([math.prod(LEVELS[:n]) for n in range(len(LEVELS))], device=device)
    digits = torch.arange(math.prod(LEVELS), device=device)[:, None] // basis % levels
    return digits / (levels // 2) - 1


class CosmosDecoder(nn.Module):
    """decoder.jit as a models.codecs.codec.Codec. It keeps the type of its weights, which is bf16 as
    published."""

    missing = ""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Opens the file, except on the device meta. CheckpointError if it holds no TorchScript."""
        super().__init__()
        self.path = path
        self.codebook = code_vectors(device)
        # Its layers work on a quarter of the pixels' side and below.
        self.config = VQConfig(
            num_embeddings=math.prod(LEVELS),
            base_channels=128,
            channel_multiplier=(0, 0, 2, 4, 4),
            rounds=True,
        )
        self.script: Any = None
        if device.type != "meta":
            with reading(path, REMEDY), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
                self.script = torch.jit.load(str(path), map_location=device)

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the images of codes, not clamped. CheckpointError if the file cannot compute them."""
        with reading(self.path, REMEDY):
            return self.script(codes[:, None])[:, :, 0].float()

    def encode(self, images: Tensor) -> Tensor:
        """Raises UserError: the encoder is another file, which is not read."""
        raise UserError("SimpleAR's encoder of pixels is not read here: only its decoder is")
