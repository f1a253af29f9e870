"""Measures whether the target's pictures show what their prompts name (eval/metrics/recogniser.py).

The gallery, which is part of the exported checkpoint, has VIEWS placements of every (style, name) pair.
Originals in new placements, encoded and decoded by the tokenizer, give the upper bound.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from eval.metrics.recogniser import GALLERY, Recogniser, write_gallery
from models.family import LoadOptions
from recipes.emoji.bpe import caption
from recipes.emoji.pictures import Pictures, place, sample_jitter
from recipes.emoji.stage import StageOptions, main
from recipes.emoji.tokenizer import Tokenizer
from storage.command_line import declare, option

BATCH_SIZE = 64  # pictures generated at once
VIEWS = 8


@declare("measurement")
class Options(StageOptions):
    """Options of the measurement."""

    model_path: str = option("exported checkpoint", "ckpts/emoji")
    cfg: float = option("guidance scale; 1: none", 3.0)
    temperature: float = option("0: greedy", 1.0)
    precision: str = option("data type of weights and activations", "fp32", choices=("fp32", "bf16"))
    threads: int = option("torch threads", 2)
    seed: int = option("seed of the first picture; each next picture takes the next seed", 0)
    num_pictures: int = option("pictures of trained pairs", 200)
    num_held_out: int = option("pictures of held-out pairs", 96)


def write_views(pictures: Pictures, path: Path) -> None:
    """Writes the gallery: VIEWS placements of every original."""
    views, names = [], []
    for row in pictures.rows:
        rng = random.Random(f"gallery/{row['index']}")
        for _ in range(VIEWS):
            views.append(place(pictures.originals[row["index"]], sample_jitter(row["name"], rng)))
            names.append(row["name"])
    write_gallery(path, np.stack(views), names)


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
    recogniser = Recogniser(Path(options.model_path) / GALLERY)
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
        by_picture = recogniser.ranks(images, [row["name"] for row in rows])
        result[label] = summary(by_picture[: options.num_pictures])
        if held_out:
            result[f"{label}_held_out"] = summary(by_picture[options.num_pictures :])
    settings = {"cfg": options.cfg, "temperature": options.temperature, "seed": options.seed}
    print(json.dumps({**settings, **result}))


if __name__ == "__main__":
    main(Options, run, __doc__)
