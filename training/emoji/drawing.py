"""Pictures drawn by an exported checkpoint, decoded plainly."""

from __future__ import annotations

import argparse

import numpy as np

from adt_tree.decode import autoregressive
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.loading import load
from models.spec import LoadOptions

AT_ONCE = 64  # pictures in flight


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every stage that draws."""
    parser.add_argument("--work_dir", default="data/emoji", help="folder that the training stages filled")
    parser.add_argument("--model_path", default="ckpts/emoji", help="exported checkpoint")
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first picture; each takes the next one")


def draw(texts: list[str], args: argparse.Namespace) -> np.ndarray:
    """uint8 [N, P, P, 3]: one picture a text, by the options of add_drawing_arguments."""
    how = LoadOptions(args.model_path, precision=args.precision, device="cpu", need_drafter=False)
    model = load("emoji", how)
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    prompts = [model.encode(text) for text in texts]
    longest = max(prompt.length for prompt in prompts)
    pictures: list[np.ndarray] = []
    for start in range(0, len(texts), AT_ONCE):
        part = prompts[start : start + AT_ONCE]
        target = model.target(len(part), sampling, 1, longest)
        requests = [Request(str(i), prompt, args.seed + start + i) for i, prompt in enumerate(part)]
        noise = Noise(model.num_codes, sampling.greedy)
        drawn = {image.name: image for image in autoregressive(target, requests, sampling, noise)}
        pictures += [np.asarray(model.image(drawn[str(i)].codes)) for i in range(len(part))]
    return np.stack(pictures)
