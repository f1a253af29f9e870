"""Measures whether pictures show the emoji that their prompts name.

A gallery holds views of every original. The names are ranked by the view that is most similar to a picture:
cosine of EfficientNet-Lite0's features at 128 px. The picture is recognised if the right name comes first.
Dimensions: N pictures of P x P pixels, F features, M views.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from eval.metrics.networks import Network, effnet
from models.checkpoint.files import reading, write_atomic

GALLERY = "gallery.safetensors"
SIDE = 128  # pixels to which pictures are resized for the network


def name_in(text: str) -> str:
    """Returns the name in a caption such as "noto emoji of red heart, love"; an empty text if it is none."""
    return text.partition(" emoji of ")[2].partition(", ")[0]


@torch.no_grad()
def embed(network: Network, images: np.ndarray) -> Tensor:
    """Returns the features [N, F] of uint8 images [N, P, P, 3]."""
    parts = (part.permute(0, 3, 1, 2).float() for part in torch.from_numpy(images).split(32))
    resized = (F.interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True) for part in parts)
    return torch.cat([network.module(part) for part in resized])


def write_gallery(path: Path, views: np.ndarray, names: Sequence[str]) -> None:
    """Writes the features of views [M, P, P, 3] as unit vectors in fp16, and the name of each."""
    features = F.normalize(embed(effnet(torch.device("cpu")), views), dim=1).half()
    write_atomic(path, save({"features": features}, {"names": json.dumps(names)}))


class Recogniser:
    """A gallery of views, and the network that compares pictures with them, on the CPU."""

    def __init__(self, gallery: Path) -> None:
        """Raises CheckpointError if the file of the gallery is missing or damaged."""
        with reading(gallery), safe_open(gallery, "pt") as file:
            self.views, names = file.get_tensor("features").float(), json.loads(file.metadata()["names"])
        self.names = sorted(set(names))
        self.name_of_view = torch.tensor([self.names.index(name) for name in names])
        self.network = effnet(torch.device("cpu"))

    def ranks(self, images: np.ndarray, right: Sequence[str]) -> list[int]:
        """Returns for each picture the number of names that are more similar to it than the right one.

        images: uint8 [N, P, P, 3]. right: their names. Rank 0 is a recognised picture.
        """
        features = embed(self.network, images)
        best = torch.full((len(features), len(self.names)), -1.0)
        similarity = F.normalize(features, dim=1) @ self.views.T
        best.scatter_reduce_(1, self.name_of_view.expand(len(features), -1), similarity, "amax")
        column = torch.tensor([self.names.index(name) for name in right], dtype=torch.int64)[:, None]
        return (best > best.gather(1, column)).sum(1).tolist()

    def recognised(self, images: np.ndarray, texts: Sequence[str]) -> list[bool | None]:
        """Returns whether each of uint8 images [N, P, P, 3] is recognised; None if its caption has no name of
        the gallery."""
        right = [name_in(text) for text in texts]
        known = [number for number, name in enumerate(right) if name in self.names]
        ranks = self.ranks(images[known], [right[number] for number in known]) if known else []
        recognised = {number: rank < 1 for number, rank in zip(known, ranks, strict=True)}
        return [recognised.get(number) for number in range(len(texts))]
