"""Measures whether the target's pictures show what their prompts name.

Every (style, name) pair is rendered in VIEWS placements: the gallery, whose features are part of the exported
checkpoint. For a generated picture the names are ranked by their most similar view (cosine of
EfficientNet-Lite0's pooled features). The picture is recognised if the name in its prompt comes first.
Originals in new placements, encoded and decoded by the tokenizer, give the upper bound. Dimensions: N
pictures, P pixels a side, F features.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling
from cli.parser import declare, option
from models.checkpoint.files import reading, write_atomic
from models.family import PRECISIONS, LoadOptions
from recipes.emoji.bpe import caption, name_in
from recipes.emoji.losses import efficientnet
from recipes.emoji.pictures import Pictures, place, sample_jitter
from recipes.emoji.stage import StageOptions
from recipes.emoji.tokenizer import Tokenizer

BATCH_SIZE = 64  # pictures generated at once
VIEWS, GALLERY = 8, "gallery.safetensors"
SIDE = 128  # pixels to which pictures are resized for the network


@declare
class Options(StageOptions):
    """recognition"""

    model_path: str = option("exported checkpoint", "ckpts/emoji", unit="DIR")
    cfg: float = option("guidance scale; 1: none", 3.0, unit="SCALE", least=0, most=100)
    temperature: float = option("0: greedy", 1.0, unit="T", least=0, most=100)
    precision: str = option("data type of weights and activations", "fp32", choices=PRECISIONS)
    threads: int = option("torch threads", 2, unit="N", least=1)
    seed: int = option("seed of the first picture; each next picture takes the next seed", 0, unit="SEED")
    num_pictures: int = option("pictures of trained pairs", 200, unit="N", least=1)
    num_held_out: int = option("pictures of held-out pairs", 96, unit="N", least=1)


@cache
def network() -> Any:
    """Returns EfficientNet-Lite0, loaded once."""
    return efficientnet().to(memory_format=torch.channels_last).eval()


@torch.no_grad()
def embed(images: np.ndarray) -> Tensor:
    """Returns EfficientNet-Lite0's pooled features [N, F] of uint8 images [N, P, P, 3]."""
    features = []
    for part in torch.from_numpy(images).split(32):
        pixels = (part.permute(0, 3, 1, 2).float() - 127) / 128
        pixels = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        features.append(network().extract_features(pixels).mean((2, 3)))
    return torch.cat(features)


def write_gallery(pictures: Pictures, path: Path) -> None:
    """Writes features [N, F] of VIEWS views of every pair as unit vectors in fp16, and the name of each."""
    views, names = [], []
    for row in pictures.rows:
        rng = random.Random(f"gallery/{row['index']}")
        for _ in range(VIEWS):
            views.append(place(pictures.originals[row["index"]], sample_jitter(row["name"], rng)))
            names.append(row["name"])
    features = F.normalize(embed(np.stack(views)), dim=1).half()
    write_atomic(path, save({"features": features}, {"names": json.dumps(names)}))


def read_gallery(path: Path) -> tuple[Tensor, list[str]]:
    """Returns what write_gallery wrote. Raises CheckpointError if the file is missing or damaged."""
    with reading(path), safe_open(path, "pt") as file:
        return file.get_tensor("features").float(), json.loads(file.metadata()["names"])


def ranks(features: Tensor, right: Sequence[str], views: Tensor, names: Sequence[str]) -> list[int]:
    """Returns for each picture the number of names that are more similar to it than the right one.

    features [N, F], right: of the pictures. views [M, F], names: the gallery. Rank 0 is a recognised picture.
    """
    order = sorted(set(names))
    group = torch.tensor([order.index(name) for name in names])
    best = torch.full((len(features), len(order)), -1.0)
    similarity = F.normalize(features, dim=1) @ views.T
    best.scatter_reduce_(1, group.expand(len(features), -1), similarity, "amax")
    column = torch.tensor([order.index(name) for name in right], dtype=torch.int64)[:, None]
    return (best > best.gather(1, column)).sum(1).tolist()


def recogniser(gallery: Path) -> Callable[[np.ndarray, Sequence[str]], tuple[Tensor, list[bool | None]]]:
    """Returns a function of uint8 images [N, P, P, 3] and their captions. It returns the images' features
    [N, F] and whether each is recognised; None where the caption has no name of the gallery.

    Raises CheckpointError if the file of the gallery is missing or damaged.
    """
    views, names = read_gallery(gallery)
    network()

    def recognise(images: np.ndarray, texts: Sequence[str]) -> tuple[Tensor, list[bool | None]]:
        features, right = embed(images), [name_in(text) for text in texts]
        known = [number for number, name in enumerate(right) if name in names]
        found = ranks(features[known], [right[number] for number in known], views, names)
        by_number = {number: rank < 1 for number, rank in zip(known, found, strict=True)}
        return features, [by_number.get(number) for number in range(len(texts))]

    return recognise


def summary(ranks: list[int]) -> dict[str, float]:
    """Returns the shares of pictures whose right name comes first, and is among the first five."""
    count = len(ranks)
    return {"pictures": count, "top1": sum(rank < 1 for rank in ranks) / count,
            "top5": sum(rank < 5 for rank in ranks) / count}  # fmt: skip


def generate(texts: list[str], options: Options) -> np.ndarray:
    """Returns a picture of the exported checkpoint for each text, uint8 [N, P, P, 3], by the AR baseline."""
    loading = LoadOptions(options.model_path, need_drafter=False)
    pipe = Pipeline.from_pretrained("emoji", device="cpu", precision=options.precision, options=loading)
    sampling = Sampling(temperature=options.temperature, guidance=options.cfg)
    return np.stack(pipe(texts, "ar", sampling=sampling, seed=options.seed, batch_size=BATCH_SIZE).images)


def run(options: Options) -> None:
    """Prints the figures as one JSON document."""
    torch.set_num_threads(options.threads)
    work = Path(options.work_dir)
    pictures, rng = Pictures(work), random.Random(f"recognise/{options.seed}")
    tokenizer = Tokenizer.load(work, torch.device("cpu"))
    views, names = read_gallery(Path(options.model_path) / GALLERY)
    rows = rng.choices(pictures.of_split("train"), k=options.num_pictures)
    held_out = pictures.of_split("held_out")
    rows += [held_out[i % len(held_out)] for i in range(options.num_held_out if held_out else 0)]
    generated = generate([caption(row["style"], row["name"], []) for row in rows], options)
    placed = np.stack(
        [place(pictures.originals[row["index"]], sample_jitter(row["name"], rng)) for row in rows]
    )
    reconstructed = tokenizer.decode(tokenizer.encode(torch.from_numpy(placed))).numpy()
    result = {}
    for label, images in (("generated", generated), ("originals_through_codes", reconstructed)):
        by_picture = ranks(embed(images), [row["name"] for row in rows], views, names)
        result[label] = summary(by_picture[: options.num_pictures])
        if held_out:
            result[f"{label}_held_out"] = summary(by_picture[options.num_pictures :])
    settings = {"cfg": options.cfg, "temperature": options.temperature, "seed": options.seed}
    print(json.dumps({**settings, **result}))
