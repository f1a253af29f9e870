"""Tiny checkpoints in the formats that the quality metrics read, with recorded weights, and test images."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from eval.metrics.networks import library
from tests.support.golden import FOLDER, tensors

for package in ("torchvision", "torch_fidelity", "open_clip", "efficientnet_lite_pytorch"):
    if find_spec(package) is None:
        reason = f"{package} is missing: bash scripts/setup.sh requirements-eval.txt"
        pytest.skip(reason, allow_module_level=True)

VOCABULARY = 49408  # of CLIP's tokenizer


def picture(width: int, height: int) -> Image.Image:
    """Returns the image of that size from which the goldens were recorded."""
    y, x = np.mgrid[0:height, 0:width]
    bow = (x - width / 2) ** 2 + (y - height / 3) ** 2
    channels = [(x * 7 + y * 3) % 256, (x * y // 5 + 40) % 256, bow % 256]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def state(name: str) -> dict[str, Tensor]:
    """Returns the recorded weights of a network, which are stored in half precision and used in fp32."""
    stored = tensors(f"metrics/{name}").items()
    return {key.removeprefix("weights."): v.float() for key, v in stored if key.startswith("weights.")}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the libraries' Inception and VGG-16 as narrow as the recorded ones."""
    for name, factor in (
        ("torch_fidelity.feature_extractor_inceptionv3", 16),
        ("torchvision.models.vgg", 32),
    ):
        layers = {kind.__name__: _narrower(kind, factor) for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)}
        monkeypatch.setattr(library(name), "nn", SimpleNamespace(**vars(nn) | layers))


def _narrower(kind: type[nn.Module], factor: int) -> type[nn.Module]:
    def slim(width: int) -> int:
        return {3: 3, 1000: 10, 4096: 64}.get(width, width // factor)  # as recorded

    class Narrower(kind):
        def __init__(self, *sizes: int, **more: object) -> None:
            super().__init__(*map(slim, sizes[:2]), *sizes[2:], **more)

    return Narrower


def inception(folder: Path) -> Path:
    """Writes a file as pytorch-fid publishes it: a state dict with the counters of batch norms."""
    weights = state("inception")
    norms = [name.removesuffix("weight") for name in weights if name.endswith("bn.weight")]
    weights |= {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms}
    torch.save(weights, folder / "pt_inception-2015-12-05.pth")
    return folder / "pt_inception-2015-12-05.pth"


def vgg(folder: Path) -> Path:
    """Writes a file as torchvision publishes it, the last layer included."""
    torch.save(state("vgg"), folder / "vgg16.pth")
    return folder / "vgg16.pth"


def clip_state() -> dict[str, Tensor]:
    """Returns the recorded CLIP with a token table for CLIP's whole vocabulary."""
    weights = state("clip")
    table = weights["token_embedding.weight"]
    rest = torch.randn(VOCABULARY - len(table), table.shape[1], generator=torch.Generator().manual_seed(4))
    return weights | {"token_embedding.weight": torch.cat((table, rest))}


def clip(folder: Path, quick_gelu: bool = False) -> Path:
    """Writes a folder in open_clip's layout."""
    place = folder / "clip"
    place.mkdir()
    save_file(clip_state(), place / "open_clip_model.safetensors")
    config = json.loads((FOLDER / "metrics" / "clip.json").read_text())
    config["model_cfg"]["text_cfg"]["vocab_size"] = VOCABULARY
    config["model_cfg"]["quick_gelu"] = quick_gelu
    (place / "open_clip_config.json").write_text(json.dumps(config))
    return place


def hps(folder: Path) -> tuple[str, Path]:
    """Registers the recorded CLIP as an architecture of open_clip and writes a file as HPS publishes it.
    Returns both."""
    config = json.loads((clip(folder) / "open_clip_config.json").read_text())["model_cfg"]
    (folder / "tiny-clip.json").write_text(json.dumps(config))
    library("open_clip").add_model_config(folder / "tiny-clip.json")
    torch.save({"epoch": 3, "state_dict": clip_state()}, folder / "HPS.pt")
    return "tiny-clip", folder / "HPS.pt"


def aesthetic(folder: Path, width: int) -> tuple[nn.Module, Path]:
    """Returns LAION's predictor for embeddings of that width, only narrower, and a file as LAION publishes
    it."""
    parts = [nn.Linear(width, 32), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2), nn.Linear(16, 8)]
    layers = nn.Sequential(*parts, nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 1)).eval()
    torch.save(nn.ModuleDict({"layers": layers}).state_dict(), folder / "aesthetic.pth")
    return layers, folder / "aesthetic.pth"
