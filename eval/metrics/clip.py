"""Scores by CLIP models of open_clip: likeness to the prompt, human preference, aesthetics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from eval.metrics import pictures
from eval.metrics.networks import Network, features, library, matching
from eval.metrics.pictures import Pair
from models.checkpoint.files import reading
from models.checkpoint.weights import read_weights, weights_in_memory


@dataclass(frozen=True, slots=True)
class Clip:
    """A CLIP model: its image tower as a feature network, and its text tower."""

    network: Network  # with the model's own preprocessing
    model: Any
    tokenize: Callable[[Sequence[str]], Tensor]  # -> token ids [N, L]


def load_clip(place: str, option: str, device: torch.device, weights: Path | None = None) -> Clip:
    """Loads a model by open_clip. CheckpointError names the option and the place if that fails.

    place: a folder or a hub repository in open_clip's layout. With a file of weights: the name of one of
    open_clip's architectures.
    """
    open_clip = library("open_clip")
    if weights is None:
        name = f"{'local-dir' if Path(place).exists() else 'hf-hub'}:{place}"
    else:
        name = place
        read_weights(weights)  # says in one line what is wrong with a damaged file, or one that holds code
    with reading(weights or Path(place), f"give a model of open_clip by {option}"):
        model, _, prepare = open_clip.create_model_and_transforms(
            name, str(weights) if weights else None, require_pretrained=True, device=device
        )
        tokenize = open_clip.get_tokenizer(name)
    model.requires_grad_(False).eval()
    digest = weights_in_memory(model, Path(place)).digest()
    return Clip(Network(prepare, model.encode_image, digest, device), model, tokenize)


def clip_scores(clip: Clip, pairs: Sequence[Pair], resolution: int, prefix: str, batch_size: int) -> Tensor:
    """Returns the CLIP score of each pair [N], neither multiplied by 100 nor clipped at 0.

    Images are cropped to their central square and resized to `resolution` by Lanczos, as in LANTERN's
    evaluation, then prepared as the model asks. prefix: words put before every prompt.
    """

    def prepare(image: Image.Image) -> Tensor:
        return clip.network.prepare(pictures.reference_crop(image, resolution))

    return _cosines(clip, pairs, prepare, prefix, batch_size)


def preference_scores(clip: Clip, pairs: Sequence[Pair], batch_size: int) -> Tensor:
    """Returns the HPS v2 score of each pair [N] (Wu et al. 2306.09341), of the whole image on a black
    square."""
    config = clip.model.visual.preprocess_cfg
    side, mean, std = config["size"][0], *(torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))

    def prepare(image: Image.Image) -> Tensor:
        return (pictures.long_side(image, side) / 255 - mean) / std

    return _cosines(clip, pairs, prepare, "", batch_size)


@torch.inference_mode()
def _cosines(
    clip: Clip, pairs: Sequence[Pair], prepare: Callable[[Image.Image], Tensor], prefix: str, batch_size: int
) -> Tensor:
    """Returns the cosines [N] between the embeddings of each image and of prefix + its prompt."""
    network = replace(clip.network, prepare=prepare)
    images = features(network, [pair.path for pair in pairs], batch_size)
    texts = []
    for start in range(0, len(pairs), batch_size):
        tokens = clip.tokenize([prefix + pair.text for pair in pairs[start : start + batch_size]])
        texts.append(clip.model.encode_text(tokens.to(network.device)).cpu())
    return F.cosine_similarity(images.double(), torch.cat(texts).double())


def aesthetic(clip: Clip, path: Path) -> Network:
    """Returns LAION's aesthetic predictor (sac+logos+ava1-l14-linearMSE). Its one feature is a score of 1 to
    10.

    It is a stack of linear layers without rectifiers on the unit CLIP embedding; the dropouts between them
    have no effect in evaluation. Raises CheckpointError if the file holds no such stack for embeddings of
    this width.
    """
    weights = read_weights(path)
    table = weights.below("layers.")
    with matching(path, "LAION aesthetic predictor"):
        numbers = sorted({int(name.partition(".")[0]) for name in table})
        layers = [(table[f"{n}.weight"].float(), table[f"{n}.bias"].float()) for n in numbers]
        if not layers:
            raise ValueError("no tensor is named layers.N.weight")

    def score(pixels: Tensor) -> Tensor:
        rows = F.normalize(clip.network.module(pixels), dim=1)
        with matching(path, "predictor for this CLIP model"):
            for weight, bias in layers:
                rows = F.linear(rows, weight.to(rows.device), bias.to(rows.device))
        return rows

    return replace(clip.network, module=score, digest=weights.digest())
