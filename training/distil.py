"""Images the target makes itself, as the drafter's training data: training prompts -> codes under guidance.

The drafter must predict the target as it decodes, so it learns from the target's own samples (as LANTERN's
drafters do), not from the data set. Features are recomputed from the codes in training and never stored.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tqdm import tqdm

from adt_tree.decode import autoregressive
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.registry import load
from training.bpe import random_caption
from training.data import read_captions
from training.loop import append_jsonl


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji distil`."""
    parser.add_argument(
        "--work_dir", default="data/emoji", help="folder of the captions; distilled.jsonl goes there"
    )
    parser.add_argument(
        "--model_path", default=None, help="exported target; default: the embedded checkpoint"
    )
    parser.add_argument("--num_images", type=int, default=640, help="images to make, earlier runs' included")
    parser.add_argument("--batch_size", type=int, default=16, help="images in flight")
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance scale")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads on the CPU")


def read_distilled(work: Path) -> list[dict]:
    """Rows {"name", "caption", "codes"} of distilled.jsonl, or none."""
    path = work / "distilled.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(args: argparse.Namespace) -> None:
    """Append to distilled.jsonl until it has num_images; image n is the same however often it was resumed."""
    torch.set_num_threads(args.threads)
    work = Path(args.work_dir)
    rows = [row for row in read_captions(work) if row["split"] == "train"]
    rng = random.Random(args.seed)
    captions = [random_caption(rows[rng.randrange(len(rows))], rng) for _ in range(args.num_images)]
    done = {row["name"] for row in read_distilled(work)}
    model = load("emoji", args.model_path, None, "fp32", "cpu", need_drafter=False)
    prompts = {str(n): model.encode(text) for n, text in enumerate(captions) if str(n) not in done}
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    longest = max((prompt.length for prompt in prompts.values()), default=1)
    target = model.target(args.batch_size, sampling, max_nodes=1, max_prompt=longest)
    requests = (Request(name, prompt, args.seed * 1_000_003 + int(name)) for name, prompt in prompts.items())
    images = autoregressive(target, requests, sampling, Noise(model.num_codes, sampling.greedy))
    for image in tqdm(images, total=len(prompts), desc="distil", unit="image"):
        row = {"name": image.name, "caption": captions[int(image.name)], "codes": image.codes}
        append_jsonl(work / "distilled.jsonl", row)
