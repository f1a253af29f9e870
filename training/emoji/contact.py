"""A contact sheet of the exported target: its drawings for seen and held-out captions, under originals."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch

from adt_tree.decode import autoregressive
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.registry import load
from training.emoji.bpe import caption
from training.emoji.data import PINNED, read_captions
from training.loop import sheet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji contact`."""
    parser.add_argument("--work_dir", default="data/emoji", help="folder of images.npy and captions.jsonl")
    parser.add_argument("--model_path", default="ckpts/emoji", help="exported checkpoint")
    parser.add_argument("--out", default=None, help="PNG (default WORK_DIR/contact.png)")
    parser.add_argument("--num_seen", type=int, default=24)
    parser.add_argument("--num_held_out", type=int, default=8)
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def choose_rows(rows: list[dict], num_seen: int, num_held_out: int, seed: int) -> list[dict]:
    """The pinned pairs, further seen pairs, then held-out pairs; a function of the seed."""
    rng = random.Random(seed)
    pinned = [row for row in rows if (row["style"], row["name"]) in PINNED]
    seen = [row for row in rows if row["split"] == "train" and row not in pinned]
    held_out = [row for row in rows if row["split"] == "held_out"]
    return (pinned + rng.sample(seen, num_seen))[:num_seen] + rng.sample(held_out, num_held_out)


def run(args: argparse.Namespace) -> None:
    """Draw and write the sheet; the last line printed is the list of captions."""
    torch.set_num_threads(args.threads)
    work = Path(args.work_dir)
    rows = choose_rows(read_captions(work), args.num_seen, args.num_held_out, args.seed)
    model = load("emoji", args.model_path, None, args.precision, "cpu", need_drafter=False)
    texts = [caption(row["style"], row["name"], []) for row in rows]
    prompts = [model.encode(text) for text in texts]
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    target = model.target(len(rows), sampling, 1, max(prompt.length for prompt in prompts))
    noise = Noise(model.num_codes, sampling.greedy)
    requests = [Request(str(i), prompt, args.seed + i) for i, prompt in enumerate(prompts)]
    drawn = {image.name: image for image in autoregressive(target, requests, sampling, noise)}
    pictures = [np.asarray(model.image(drawn[str(i)].codes)) for i in range(len(rows))]
    originals = np.load(work / "images.npy")[[row["index"] for row in rows]]
    lines = [picture for start in range(0, len(rows), 8) for part in (originals, pictures)
             for picture in part[start : start + 8]]  # fmt: skip
    sheet(np.stack(lines), 8, Path(args.out) if args.out else work / "contact.png")
    print(json.dumps(texts))
