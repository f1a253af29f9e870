"""Images the target makes itself, as the drafter's training data: training prompts -> codes under guidance.

The drafter must predict the target as it decodes, so it learns from the target's own samples (as LANTERN's
drafters do), not from the data set. Features are recomputed from the codes in training and never stored.
Every image names the target's weights: images of other weights teach a law that no longer decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import torch
from tqdm import tqdm

from adt_tree.decode import autoregressive
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.errors import CheckpointError
from models.model import Model
from models.registry import load
from training.bpe import random_caption
from training.data import read_captions
from training.errors import StageError
from training.loop import add_stage_arguments, append_jsonl, discard, use_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji distil`."""
    add_stage_arguments(parser)
    parser.add_argument(
        "--model_path", default=None, help="exported target; default: the embedded checkpoint"
    )
    parser.add_argument("--num_images", type=int, default=640, help="images to make, earlier runs' included")
    parser.add_argument("--batch_size", type=int, default=16, help="images in flight")
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance scale")
    parser.add_argument("--temperature", type=float, default=1.0)


def load_target(path: str | None, device: torch.device) -> Model:
    """The exported target in fp32, without a drafter. StageError if it cannot be loaded."""
    try:
        return load("emoji", path, None, "fp32", str(device), need_drafter=False)
    except CheckpointError as error:
        raise StageError(str(error)) from error


def refuse_other_target(path: Path, made_with: str | None, weights_sha: str, stage: str) -> None:
    """StageError if the file at path, made by `stage`, belongs to other target weights than weights_sha."""
    if made_with != weights_sha:
        was = f"target weights {made_with}" if made_with else "target weights it does not name"
        raise StageError(
            f"{path} was made with {was}, not with {weights_sha}: pass that target in --model_path, or run "
            f"`{stage} --restart`, which discards the file"
        )


def whole_lines(path: Path) -> bytes:
    """The file's content up to its last line end: a line torn by a kill is left out. No file: nothing."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def read_distilled(work: Path, weights_sha: str) -> list[dict]:
    """Rows {"name", "caption", "codes", "target"} of distilled.jsonl, or none.

    StageError if one was made with other target weights, or is no row at all.
    """
    path, rows = work / "distilled.jsonl", []
    for number, line in enumerate(whole_lines(path).splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise StageError(
                f"{path}, line {number}: damaged: run `distil --restart`, which discards the file"
            ) from None
        refuse_other_target(path, rows[-1].get("target"), weights_sha, "distil")
    return rows


def run(args: argparse.Namespace) -> None:
    """Append to distilled.jsonl until it has num_images; image n is the same however often it was resumed."""
    device = use_device(args)
    work = Path(args.work_dir)
    path = work / "distilled.jsonl"
    rows = [row for row in read_captions(work) if row["split"] == "train"]
    rng = random.Random(args.seed)
    captions = [random_caption(rows[rng.randrange(len(rows))], rng) for _ in range(args.num_images)]
    model = load_target(args.model_path, device)
    if args.restart:
        discard(path)
    done = {row["name"] for row in read_distilled(work, model.weights_sha)}
    if path.exists():
        os.truncate(path, len(whole_lines(path)))  # the next row must not continue a torn one
    prompts = {str(n): model.encode(text) for n, text in enumerate(captions) if str(n) not in done}
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    longest = max((prompt.length for prompt in prompts.values()), default=1)
    target = model.target(args.batch_size, sampling, max_nodes=1, max_prompt=longest)
    requests = (Request(name, prompt, args.seed * 1_000_003 + int(name)) for name, prompt in prompts.items())
    images = autoregressive(target, requests, sampling, Noise(model.num_codes, sampling.greedy))
    for image in tqdm(images, total=len(prompts), desc="distil", unit="image"):
        row = {"name": image.name, "caption": captions[int(image.name)], "codes": image.codes}
        append_jsonl(path, row | {"target": model.weights_sha})
