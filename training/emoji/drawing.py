"""Pictures drawn by an exported checkpoint, decoded plainly."""

from __future__ import annotations

from typing import Any

import numpy as np

from adt_tree.decode import autoregressive, finished
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.loading import load
from models.spec import LoadOptions

AT_ONCE = 64  # pictures in flight


def draw(texts: list[str], args: Any) -> np.ndarray:
    """uint8 [N, P, P, 3]: one picture a text, by the options of every stage that draws."""
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
        drawn = {image.name: image for image in finished(autoregressive(target, requests, sampling, noise))}
        pictures += [np.asarray(model.image(drawn[str(i)].codes)) for i in range(len(part))]
    return np.stack(pictures)
