"""Tiny checkpoints in the formats that quality metrics read, on recorded weights, and what they saw."""

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

from eval.metrics.clip import Clip, load_clip
from eval.metrics.networks import library
from eval.metrics.sources import clip_config, clip_weights
from tests.golden import FOLDER, tensors

for package in ("torchvision", "torchmetrics", "torch_fidelity", "open_clip", "efficientnet_lite_pytorch"):
    if find_spec(package) is None:
        reason = f"{package} is missing: bash scripts/setup.sh requirements-eval.txt"
        pytest.skip(reason, allow_module_level=True)

VOCABULARY = 49408  # of CLIP's tokenizer


def picture(width: int, height: int) -> Image.Image:
    """The picture that the references saw in that size."""
    y, x = np.mgrid[0:height, 0:width]
    bow = (x - width / 2) ** 2 + (y - height / 3) ** 2
    channels = [(x * 7 + y * 3) % 256, (x * y // 5 + 40) % 256, bow % 256]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def state(name: str) -> dict[str, Tensor]:
    """Recorded weights: stored in half precision, meant as fp32."""
    found = tensors(f"metrics/{name}").items()
    return {key.removeprefix("weights."): v.float() for key, v in found if key.startswith("weights.")}


def narrow(patch: pytest.MonkeyPatch) -> None:
    """The libraries' Inception and VGG-16 in the recorded widths: every layer narrower, nothing else."""
    for name, by in (("torch_fidelity.feature_extractor_inceptionv3", 16), ("torchvision.models.vgg", 32)):
        made = {kind.__name__: _narrower(kind, by) for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)}
        patch.setattr(library(name), "nn", SimpleNamespace(**vars(nn) | made))


def _narrower(kind: type[nn.Module], by: int) -> type[nn.Module]:
    def slim(width: int) -> int:
        return {3: 3, 1000: 10, 4096: 64}.get(width, width // by)  # as recorded

    class Narrower(kind):
        def __init__(self, *given: int, **more: object) -> None:
            super().__init__(*map(slim, given[:2]), *given[2:], **more)

    return Narrower


def inception(folder: Path) -> Path:
    """As pytorch-fid publishes it: a bare state dict with the counters of batch norms."""
    weights = state("inception")
    norms = [name.removesuffix("weight") for name in weights if name.endswith("bn.weight")]
    weights |= {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms}
    torch.save(weights, folder / "pt_inception-2015-12-05.pth")
    return folder / "pt_inception-2015-12-05.pth"


def vgg(folder: Path) -> Path:
    """As torchvision publishes it, the last layer included."""
    torch.save(state("vgg"), folder / "vgg16.pth")
    return folder / "vgg16.pth"


def clip_state() -> dict[str, Tensor]:
    """The recorded CLIP, its table of tokens as long as CLIP's vocabulary."""
    weights = state("clip")
    table = weights["token_embedding.weight"]
    rest = torch.randn(VOCABULARY - len(table), table.shape[1], generator=torch.Generator().manual_seed(4))
    return weights | {"token_embedding.weight": torch.cat((table, rest))}


def clip(folder: Path) -> Path:
    """A folder in open_clip's layout."""
    place = folder / "clip"
    place.mkdir()
    save_file(clip_state(), place / "open_clip_model.safetensors")
    config = json.loads((FOLDER / "metrics" / "clip.json").read_text())
    config["model_cfg"]["text_cfg"]["vocab_size"] = VOCABULARY
    (place / "open_clip_config.json").write_text(json.dumps(config))
    return place


def loaded_clip(folder: Path) -> Clip:
    """The model of such a folder."""
    place = (str(folder), "--clip_path")
    return load_clip(clip_config(*place), clip_weights(*place), torch.device("cpu"))


def hps(folder: Path) -> Path:
    """As HPS publishes it: the state dict of the same model among other things."""
    torch.save({"epoch": 3, "state_dict": clip_state()}, folder / "HPS.pt")
    return folder / "HPS.pt"


def aesthetic_head(width: int) -> nn.ModuleDict:
    """LAION's definition, narrower."""
    parts = [nn.Linear(width, 32), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2), nn.Linear(16, 8)]
    return nn.ModuleDict({"layers": nn.Sequential(*parts, nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 1))})


def aesthetic(folder: Path, head: nn.Module) -> Path:
    """As LAION publishes it."""
    torch.save(head.state_dict(), folder / "aesthetic.pth")
    return folder / "aesthetic.pth"
