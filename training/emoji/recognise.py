"""Are the target's pictures what their prompts say? The nearest original, by features of a published network.

Every (style, name) pair is drawn under VIEWS jitters; a picture's names are ranked by the most similar view
(cosine of EfficientNet-Lite0's pooled features). The ceiling is the same for originals under fresh jitter
that went through the tokenizer. N pictures, P pixels a side, F features.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling
from models.spec import LoadOptions
from training.emoji.bpe import caption
from training.emoji.losses import efficientnet
from training.emoji.pictures import Pictures, draw_jitter, place
from training.emoji.tokenizer import Tokenizer
from training.loop import write_figures

AT_ONCE = 64  # pictures in flight
VIEWS = 8
SIDE = 128  # pixels the network sees


@torch.no_grad()
def embed(images: np.ndarray) -> Tensor:
    """Unit vectors [N, F] of uint8 images [N, P, P, 3], by EfficientNet-Lite0 without its classifier."""
    net, found = efficientnet().to(memory_format=torch.channels_last).eval(), []
    for part in torch.from_numpy(images).split(32):
        pixels = (part.permute(0, 3, 1, 2).float() - 127) / 128
        pixels = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        found.append(net.extract_features(pixels).mean((2, 3)))
    return F.normalize(torch.cat(found), dim=1)


def gallery(pictures: Pictures) -> tuple[Tensor, list[str]]:
    """Features [N, F] of VIEWS views of every pair, and their names."""
    views, names = [], []
    for row in pictures.rows:
        rng = random.Random(f"gallery/{row['index']}")
        for _ in range(VIEWS):
            views.append(place(pictures.originals[row["index"]], draw_jitter(row["name"], rng)))
            names.append(row["name"])
    return embed(np.stack(views)), names


def ranks(features: Tensor, rows: list[dict], known: Tensor, names: list[str]) -> list[int]:
    """For each picture the place, from 0, of its row's name among names by their most similar view."""
    order = sorted(set(names))
    group = torch.tensor([order.index(name) for name in names])
    best = torch.full((len(features), len(order)), -1.0)
    best.scatter_reduce_(1, group.expand(len(features), -1), features @ known.T, "amax")
    own = best.gather(1, torch.tensor([[order.index(row["name"])] for row in rows]))
    return (best > own).sum(1).tolist()


def summary(found: list[int]) -> dict[str, float]:
    """Shares whose right name is the first, and is among the first five."""
    count = len(found)
    return {"pictures": count, "top1": sum(rank < 1 for rank in found) / count,
            "top5": sum(rank < 5 for rank in found) / count}  # fmt: skip


def draw(texts: list[str], args: Any) -> np.ndarray:
    """uint8 [N, P, P, 3]: a picture of the exported checkpoint for each text, decoded plainly."""
    options = LoadOptions(args.model_path, need_drafter=False)
    pipe = Pipeline.from_pretrained("emoji", device="cpu", precision=args.precision, options=options)
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    return np.stack(pipe(texts, "ar", sampling=sampling, seed=args.seed, batch_size=AT_ONCE).images)


def run(args: Any) -> None:
    """Draw, compare, print one JSON line and keep it for the model card."""
    torch.set_num_threads(args.threads)
    work = Path(args.work_dir)
    pictures, rng = Pictures(work), random.Random(f"recognise/{args.seed}")
    tokenizer = Tokenizer.load(work, torch.device("cpu"))
    known, names = gallery(pictures)
    rows = rng.choices(pictures.of_split("train"), k=args.num_pictures)
    held_out = pictures.of_split("held_out")
    rows += [held_out[i % len(held_out)] for i in range(args.num_held_out if held_out else 0)]
    drawn = draw([caption(row["style"], row["name"], []) for row in rows], args)
    again = np.stack([place(pictures.originals[row["index"]], draw_jitter(row["name"], rng)) for row in rows])
    through = tokenizer.decode(tokenizer.encode(torch.from_numpy(again))).numpy()
    result = {}
    for label, images in (("drawn", drawn), ("originals_through_codes", through)):
        found = ranks(embed(images), rows, known, names)
        result[label] = summary(found[: args.num_pictures])
        if held_out:
            result[f"{label}_held_out"] = summary(found[args.num_pictures :])
    drawn_by = {"cfg": args.cfg, "temperature": args.temperature, "seed": args.seed}
    write_figures(work, "recognised", {**drawn_by, **result})
