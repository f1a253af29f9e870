"""What CLIP models say of images: likeness to the prompt, human preference, beauty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from eval.metrics import pictures
from eval.metrics.aesthetic import Aesthetic
from eval.metrics.clip import Clip
from eval.metrics.pictures import Pair
from eval.metrics.sets import Prepare, paths_of, through


@torch.inference_mode()
def likeness(
    clip: Clip, pairs: Sequence[Pair], prepare: Prepare, lead: str, device: torch.device, batch_size: int
) -> Tensor:
    """Cosine [N] of each image's embedding and that of lead and its prompt."""
    images = through(paths_of(pairs), prepare, clip.images, device, batch_size)
    texts = []
    for start in range(0, len(pairs), batch_size):
        ids = clip.encode([pair.text for pair in pairs[start : start + batch_size]], lead)
        texts.append(clip.texts(ids).float().cpu())
    return F.cosine_similarity(images.double(), torch.cat(texts).double())


def clip_scores(
    clip: Clip, pairs: Sequence[Pair], resolution: int, lead: str, device: torch.device, batch_size: int
) -> Tensor:
    """CLIP score [N], not times 100 and not clipped: LANTERN's crop to resolution, then CLIP's own."""

    def prepare(image: Image.Image) -> Tensor:
        return _for_clip(clip, pictures.reference_crop(image, resolution))

    return likeness(clip, pairs, prepare, lead, device, batch_size)


def preference_scores(clip: Clip, pairs: Sequence[Pair], device: torch.device, batch_size: int) -> Tensor:
    """HPS v2 [N] under an HPS checkpoint: the whole image on a black square."""

    def prepare(image: Image.Image) -> Tensor:
        return pictures.normalise(pictures.long_side(image, clip.side), clip.mean, clip.std)

    return likeness(clip, pairs, prepare, "", device, batch_size)


def aesthetic_scores(
    clip: Clip, head: Aesthetic, paths: Sequence[Path], device: torch.device, batch_size: int
) -> Tensor:
    """LAION's aesthetic score [N] of images in CLIP's own preprocessing."""

    def network(pixels: Tensor) -> Tensor:
        return head.scores(clip.images(pixels))[:, None]

    return through(paths, lambda image: _for_clip(clip, image), network, device, batch_size)[:, 0]


def _for_clip(clip: Clip, image: Image.Image) -> Tensor:
    shown = pictures.to_tensor(pictures.short_side(image, clip.side))
    return pictures.normalise(shown, clip.mean, clip.std)
