"""What CLIP models say of images, by open_clip: likeness to the prompt, human preference, beauty."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from adt_tree.errors import CheckpointError
from eval.metrics import pictures
from eval.metrics.networks import Network, features, fitting, library
from eval.metrics.pictures import Pair
from models.checkpoint.weights import read_weights


@dataclass(frozen=True, slots=True)
class Clip:
    """Both towers of a model. network: pictures in the model's own preprocessing -> embeddings."""

    network: Network
    texts: Callable[[Sequence[str]], Tensor]  # -> embeddings [N, D]
    side: int
    normalise: Callable[[Tensor], Tensor]  # of pixels of 0 to 255
    width: int  # values of an embedding


def load_clip(config: Path | str, weights_path: Path, device: torch.device) -> Clip:
    """A CLIP of open_clip's kind over a state dict (safetensors or torch.save; HPS's lies under state_dict).

    config: open_clip_config.json, or the name of an architecture that open_clip knows.
    """
    open_clip, weights = library("open_clip"), read_weights(weights_path)
    settings, prepared = _settings(open_clip, config)
    with fitting(config, "configuration of a plain CLIP"):
        model = open_clip.CLIP(**settings)
    with fitting(weights_path, "open_clip state dict of the configured CLIP"):
        model.load_state_dict(dict(weights))
    tokenizer = open_clip.SimpleTokenizer(context_length=model.context_length)
    if model.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"{config}: vocab_size {model.vocab_size} is not that of CLIP's tokenizer, "
            f"{tokenizer.vocab_size}: give a CLIP that reads plain English"
        )
    model.requires_grad_(False).eval().to(device)
    mean = prepared.get("mean", open_clip.OPENAI_DATASET_MEAN)
    std = prepared.get("std", open_clip.OPENAI_DATASET_STD)
    side = model.visual.image_size[0]
    own = open_clip.image_transform(side, is_train=False, mean=mean, std=std)
    return Clip(
        Network(own, model.encode_image, weights.digest(), device),
        lambda texts: model.encode_text(tokenizer(list(texts)).to(device)).float().cpu(),
        side,
        lambda pixels: pictures.normalise(pixels, mean, std),
        model.visual.output_dim,
    )


def _settings(open_clip: Any, config: Path | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's settings and its preprocessing's. CheckpointError if the file is damaged."""
    if isinstance(config, str):
        return open_clip.get_model_config(config), {}
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return dict(content["model_cfg"]), dict(content.get("preprocess_cfg") or {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config} is no open_clip configuration ({error!r}): fetch it again") from None


def clip_scores(clip: Clip, pairs: Sequence[Pair], resolution: int, lead: str, batch_size: int) -> Tensor:
    """CLIP score [N], not times 100 and not clipped: LANTERN's crop to resolution, then CLIP's own.

    lead: words before every prompt.
    """

    def prepare(image: Image.Image) -> Tensor:
        return clip.network.prepare(pictures.reference_crop(image, resolution))

    return _likeness(clip, pairs, prepare, lead, batch_size)


def preference_scores(clip: Clip, pairs: Sequence[Pair], batch_size: int) -> Tensor:
    """HPS v2 [N] under an HPS checkpoint: the whole image on a black square."""

    def prepare(image: Image.Image) -> Tensor:
        return clip.normalise(pictures.long_side(image, clip.side))

    return _likeness(clip, pairs, prepare, "", batch_size)


@torch.inference_mode()
def _likeness(
    clip: Clip, pairs: Sequence[Pair], prepare: Callable[[Image.Image], Tensor], lead: str, batch_size: int
) -> Tensor:
    """Cosine [N] of each image's embedding and that of lead and its prompt."""
    images = features(replace(clip.network, prepare=prepare), [pair.path for pair in pairs], batch_size)
    starts = range(0, len(pairs), batch_size)
    texts = [clip.texts([lead + pair.text for pair in pairs[n : n + batch_size]]) for n in starts]
    return F.cosine_similarity(images.double(), torch.cat(texts).double())


def aesthetic(clip: Clip, path: Path) -> Network:
    """LAION's aesthetic predictor (sac+logos+ava1-l14-linearMSE): a stack of linear layers, dropouts between
    them and no rectifiers, on the unit CLIP embedding. One feature, the score, about 1 to 10.
    """
    weights = read_weights(path)
    layers = nn.Sequential()
    with fitting(path, "LAION aesthetic head"):
        for name in sorted(weights.below("layers."), key=lambda name: int(name.split(".")[0])):
            if name.endswith(".weight"):
                out, reads = weights.shapes[f"layers.{name}"]
                layers.add_module(name.split(".")[0], nn.Linear(reads, out))
        layers.load_state_dict(dict(weights.below("layers.")))
        if layers[0].in_features != clip.width:
            raise ValueError(f"it reads {layers[0].in_features} values, the CLIP model gives {clip.width}")
    layers.to(clip.network.device)

    def score(pixels: Tensor) -> Tensor:
        return layers(F.normalize(clip.network.module(pixels), dim=1))

    return replace(clip.network, module=score, digest=weights.digest())
