"""bench --quality: the scores of every image, and the AR baseline at other seeds.

A score means something only beside its floor, the score of a second sample of the AR baseline. So the
baseline is measured at two seeds for each image. Likelihood is that of the guided distribution at temperature
1 without filters, so images at any temperature compare, and a code that a filter would exclude has a finite
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from adt_tree.roles import Request, Target
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from eval.harness import Decodes, Outcome
from eval.metrics.recogniser import Recogniser
from models.model import Model
from storage.measurements import Measured
from storage.prompts import image_seed

BATCH = 64  # images that are recognised at once
NODES = 128  # codes of a pass that computes likelihoods


@dataclass(frozen=True, slots=True)
class Quality:
    """The scores of one image."""

    nll: float  # mean of -log p over its codes, in nats
    recognised: bool | None = None


@dataclass(frozen=True, slots=True)
class OtherSeeds:
    """The AR baseline with another seed for every request (eval.harness.Decodes)."""

    engine: Decodes

    def steps(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Yields the outcome of every step."""
        others = (replace(request, seed=image_seed(request.seed, request.name)) for request in requests)
        return self.engine.steps(others)


def nll(target: Target, sampling: Sampling, prompt: object, image: Sequence[int]) -> float:
    """Returns the mean of -log p over the codes of an image, each after those before it in raster order.
    target: with a slot and room for NODES nodes."""
    ends = [target.grid.is_row_end(position) for position in range(target.grid.length)]
    following = iter(image)
    cells = torch.tensor([0 if end else next(following) for end in ends], device=target.device)
    logits = target.prefill({0: prompt})[0].logits[:, None]
    settings, first = PassSampling.uniform(sampling, logits.device), 0
    values = [log_probs(logits, settings)[:, cells[0]]]
    for codes in cells[:-1].split(NODES):  # each code as the parent of the next
        depths = torch.arange(len(codes), device=target.device)[None]
        ancestors, every = depths[..., None] >= depths[:, None], torch.ones_like(depths, dtype=torch.bool)
        tree = DraftTree(codes[None], (depths - 1).clamp(min=0), depths, ancestors, every, len(codes) - 1, 1)
        log_p = log_probs(target.forward(tree, [first]).logits[:, 0], settings)
        target.commit(tree, Verdict(depths, depths[:, -1] + 1, codes[None]))
        values.append(log_p.gather(1, cells[first + 1 : first + 1 + len(codes), None])[:, 0])
        first += len(codes)
    return -float(torch.cat(values)[~torch.tensor(ends)].mean())


@torch.inference_mode()
def score(
    model: Model,
    guidance: float,
    requests: Sequence[Request],
    texts: Mapping[str, str],
    measured: Mapping[str, Sequence[Measured]],
    recogniser: Recogniser | None,
) -> dict[str, list[Quality]]:
    """Returns the scores of all images by configuration. An image that several of them made is scored once.

    requests: those of the images. texts: the prompts by the names of images. recogniser: None scores NLL
    alone.
    """
    encoded = {request.name: request.prompt for request in requests}
    images = {
        name: [(image.name, tuple(image.codes)) for batch in batches for image in batch.images]
        for name, batches in measured.items()
    }
    distinct = list(dict.fromkeys(image for made in images.values() for image in made))
    sampling = Sampling(guidance=guidance)
    target = model.target(1, sampling, NODES, max(prompt.length for prompt in encoded.values()))
    scores: dict[tuple[str, tuple[int, ...]], Quality] = {}
    for name, codes in tqdm(distinct, "likelihood", unit="image"):
        scores[name, codes] = Quality(nll(target, sampling, encoded[name], codes))
    if recogniser is not None:
        for first in tqdm(range(0, len(distinct), BATCH), "recognition", unit="batch"):
            part = distinct[first : first + BATCH]
            pixels = np.stack([np.asarray(model.image(list(codes))) for _, codes in part])
            found = recogniser.recognised(pixels, [texts[name] for name, _ in part])
            for image, recognised in zip(part, found, strict=True):
                scores[image] = replace(scores[image], recognised=recognised)
    return {name: [scores[image] for image in made] for name, made in images.items()}
