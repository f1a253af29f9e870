"""generate_train_data: prompts -> the target's own images, as codes, for its drafter to learn from.

A drafter must predict the target as it decodes, so it learns from what the target draws under guidance.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

from adt_tree.decode import autoregressive
from adt_tree.noise import Noise
from adt_tree.sampling import Sampling
from eval.errors import UserError
from eval.families import check_family
from eval.method import check_drafter
from eval.prompts import CONFIGS, load_prompts
from eval.session import load_model, make_requests
from models.model import Model
from models.shards import ShardWriter, Stored, origin
from models.target import EncodedPrompt
from models.teacher import features

DEFAULT_FILE = CONFIGS / "emoji_drafter_prompts.txt"


def run(args: argparse.Namespace) -> None:
    """Draw every prompt that the folder has no image of yet; the last line printed is one JSON document."""
    check_family(args)
    check_drafter(args, ())
    prompts = load_prompts(args, DEFAULT_FILE)
    model = load_model(args, need_drafter=False)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.cfg)
    law = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "cfg": args.cfg,
           "random_seed": args.random_seed, "precision": args.precision}  # fmt: skip
    facts = {**origin(model, drawn=True, features=args.features), **law}
    writer = ShardWriter(Path(args.output_dir), facts, args.shard_size)
    pending = [prompt for prompt in prompts if prompt.name not in writer.names]
    started = time.perf_counter()
    if pending:
        requests, longest = make_requests(model, pending, args.random_seed)
        openings = {request.name: request.prompt for request in requests}
        texts = {prompt.name: prompt.text for prompt in pending}
        slots = min(args.batch_size, len(requests))
        try:
            target = model.target(slots, sampling, max_nodes=1, max_prompt=longest)
        except ValueError as error:
            raise UserError(str(error)) from error
        images = autoregressive(target, requests, sampling, Noise(model.num_codes, sampling.greedy))
        try:
            for image in tqdm(images, total=len(requests), unit="image", disable=None):
                kept = keep(model, openings[image.name], image.codes) if args.features else ()
                writer.add(Stored(image.name, texts[image.name], image.seed, image.codes, kept))
        finally:
            writer.flush()
    wall = time.perf_counter() - started
    made = {"images": len(prompts), "skipped": len(prompts) - len(pending), "wall_s": round(wall, 1)}
    print(json.dumps({**made, "output_dir": args.output_dir}))


def keep(model: Model, opening: EncodedPrompt, codes: list[int]) -> list[torch.Tensor]:
    """The features of one image, both branches."""
    return features(model, [opening], torch.tensor([codes]))[0]
