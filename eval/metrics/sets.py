"""Images of a set -> what a network makes of them, in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from eval.metrics import effnet, pictures, vgg
from eval.metrics.effnet import EffNet
from eval.metrics.inception import SIDE, Inception
from eval.metrics.pictures import Pair
from eval.metrics.vgg import VGG
from models.errors import CheckpointError, reason

Prepare = Callable[[Image.Image], Tensor]


@torch.inference_mode()
def through(
    paths: Sequence[Path],
    prepare: Prepare,
    network: Callable[[Tensor], Tensor],
    device: torch.device,
    batch_size: int,
) -> Tensor:
    """The network's rows [N, D] for the images, on the CPU, in their order."""
    rows = []
    with tqdm(total=len(paths), unit="image", disable=None, leave=False) as bar:
        for start in range(0, len(paths), batch_size):
            some = paths[start : start + batch_size]
            batch = torch.stack([prepare(pictures.read_image(path)) for path in some]).to(device)
            try:
                rows.append(network(batch).float().cpu())
            except torch.OutOfMemoryError as error:
                raise CheckpointError(
                    f"no room for --batch_size {batch_size} on {device} ({reason(error)})"
                ) from None
            bar.update(len(some))
    return torch.cat(rows)


def inception_features(
    net: Inception, paths: Sequence[Path], resolution: int, device: torch.device, batch_size: int
) -> Tensor:
    """Features for FID, KID and IS: centre square, Lanczos to resolution, clean-fid's resize to 299."""

    def prepare(image: Image.Image) -> Tensor:
        return pictures.fine_resize(pictures.reference_crop(image, resolution), SIDE)

    return through(paths, prepare, net.features, device, batch_size)


def vgg_features(net: VGG, paths: Sequence[Path], device: torch.device, batch_size: int) -> Tensor:
    """Features for precision and recall: both sides to 224, whatever the shape, as in the published code."""

    def prepare(image: Image.Image) -> Tensor:
        shown = image.resize((vgg.SIDE, vgg.SIDE), Image.Resampling.BILINEAR)
        return pictures.normalise(pictures.to_tensor(shown), vgg.MEAN, vgg.STD)

    return through(paths, prepare, net.features, device, batch_size)


def effnet_features(net: EffNet, paths: Sequence[Path], device: torch.device, batch_size: int) -> Tensor:
    """Features for EffNet-FD: centre square, bicubic to 224."""

    def prepare(image: Image.Image) -> Tensor:
        pixels = pictures.fine_resize(pictures.centre_square(image), effnet.SIDE)
        return pictures.normalise(pixels, effnet.MEAN, effnet.STD)

    return through(paths, prepare, net.features, device, batch_size)


def paths_of(pairs: Sequence[Pair]) -> list[Path]:
    """The images of pairs."""
    return [pair.path for pair in pairs]
