"""Tiny checkpoints in the formats that quality metrics read, on recorded weights, and what they saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from tests.golden import FOLDER, tensors


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


def clip(folder: Path) -> Path:
    """A folder in open_clip's layout."""
    place = folder / "clip"
    place.mkdir()
    save_file(state("clip"), place / "open_clip_model.safetensors")
    (place / "open_clip_config.json").write_text((FOLDER / "metrics" / "clip.json").read_text())
    tokenizer().save(str(place / "tokenizer.json"))
    return place


def hps(folder: Path) -> Path:
    """As HPS publishes it: the state dict of the same model among other things."""
    torch.save({"epoch": 3, "state_dict": state("clip")}, folder / "HPS.pt")
    return folder / "HPS.pt"


def tokenizer() -> Tokenizer:
    """CLIP's kind of tokenizer over letters; start and end have the highest ids of the 300."""
    ends = [f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz"]
    words = [*"abcdefghijklmnopqrstuvwxyz", *ends, "ca", "cat</w>", "photo</w>"]
    words += [f"<unused{n}>" for n in range(298 - len(words))] + ["<|startoftext|>", "<|endoftext|>"]
    merges = [("c", "a"), ("ca", "t</w>")]
    made = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, merges, end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def aesthetic(folder: Path, width: int) -> Path:
    """As LAION publishes it: linear layers 0, 2, 4, 6, 7 of a module named layers."""
    rng = torch.Generator().manual_seed(9)
    sizes = {0: (width, 32), 2: (32, 16), 4: (16, 8), 6: (8, 4), 7: (4, 1)}
    weights = {}
    for number, (reads, gives) in sizes.items():
        weights[f"layers.{number}.weight"] = torch.randn(gives, reads, generator=rng) / reads**0.5
        weights[f"layers.{number}.bias"] = torch.randn(gives, generator=rng)
    torch.save(weights, folder / "aesthetic.pth")
    return folder / "aesthetic.pth"
