"""bench --quality: the scores of every image, and the AR baseline at other seeds.

A score means something only beside its floor, the score of a second sample of the AR baseline. So the
baseline is measured at two seeds for each image. Dimensions: N images of P x P pixels, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval.harness import Decodes, Outcome
from eval.likelihood import NODES, nll
from eval.metrics.distances import kid_of_pairs
from models.model import Model
from storage.measurements import Measured
from storage.prompts import image_seed

BATCH = 64  # images whose features are computed at once
MAX_BLOCKS = 8

# From uint8 images [N, P, P, 3] and their prompts to features [N, F] and whether each image shows what its
# prompt names; None for a prompt that names nothing known.
Recognise = Callable[[np.ndarray, Sequence[str]], tuple[Tensor, Sequence[bool | None]]]


@dataclass(frozen=True, slots=True)
class Quality:
    """The scores of one image."""

    nll: float  # mean of -log p over its codes, in nats
    block: int  # of its seed
    features: Tensor | None = None  # [F]
    recognised: bool | None = None


@dataclass(frozen=True, slots=True)
class OtherSeeds:
    """The AR baseline with another seed for every request (eval.harness.Decodes)."""

    engine: Decodes

    def steps(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Yields the outcome of every step."""
        others = (replace(request, seed=image_seed(request.seed, request.name)) for request in requests)
        return self.engine.steps(others)


@torch.inference_mode()
def score(
    model: Model,
    guidance: float,
    requests: Sequence[Request],
    texts: Mapping[str, str],
    seeds: int,
    measured: Mapping[str, Sequence[Measured]],
    recognise: Recognise | None,
) -> dict[str, list[Quality]]:
    """Returns the scores of all images by configuration. An image that several of them made is scored once.

    requests: those of the images, every prompt once for each of the `seeds` seeds. texts: the prompts by the
    images' names. recognise: None leaves features and recognition out.
    """
    encoded = {request.name: request.prompt for request in requests}
    block = blocks(list(encoded), seeds)
    images = {
        name: [(image.name, tuple(image.codes)) for batch in batches for image in batch.images]
        for name, batches in measured.items()
    }
    distinct = list(dict.fromkeys(image for made in images.values() for image in made))
    sampling = Sampling(guidance=guidance)
    target = model.target(1, sampling, NODES, max(prompt.length for prompt in encoded.values()))
    scores: dict[tuple[str, tuple[int, ...]], Quality] = {}
    for name, codes in tqdm(distinct, "likelihood", unit="image"):
        scores[name, codes] = Quality(nll(target, sampling, encoded[name], codes), block[name])
    if recognise is not None:
        for first in tqdm(range(0, len(distinct), BATCH), "recognition", unit="batch"):
            part = distinct[first : first + BATCH]
            pixels = np.stack([np.asarray(model.image(list(codes))) for _, codes in part])
            found = zip(part, *recognise(pixels, [texts[name] for name, _ in part]), strict=True)
            for image, features, recognised in found:
                scores[image] = replace(scores[image], features=features, recognised=recognised)
    return {name: [scores[image] for image in made] for name, made in images.items()}


def blocks(names: Sequence[str], seeds: int) -> dict[str, int]:
    """Returns the block of every image. Seeds are dealt in turn to seeds // 2 blocks, at least one
    and at most MAX_BLOCKS; so a block holds every prompt.

    names: of the images, every prompt once for each of the `seeds` seeds, all prompts before the next seed.
    """
    prompts, count = len(names) // seeds, max(1, min(MAX_BLOCKS, seeds // 2))
    return {name: number // prompts % count for number, name in enumerate(names)}


def kid_by_block(images: Sequence[Quality], others: Sequence[Quality]) -> list[float]:
    """Returns the kernel distance of images from `others`, which have the same prompts in the same order, in
    each block of seeds. The blocks are independent samples of it. A block of one image has none."""
    values = []
    for block in sorted({image.block for image in images}):
        pairs = [
            (image.features, other.features)
            for image, other in zip(images, others, strict=True)
            if image.block == block and image.features is not None and other.features is not None
        ]
        if len(pairs) > 1:
            values.append(kid_of_pairs(*map(torch.stack, zip(*pairs, strict=True))))
    return values
