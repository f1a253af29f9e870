"""The metrics of evaluate by name: each finds its network, measures the images, and returns its scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from adt_tree.errors import UserError
from eval.metrics.clip import aesthetic, clip_scores, load_clip, preference_scores
from eval.metrics.distances import frechet, inception_score, kid, precision_recall
from eval.metrics.metric_weights import CLIPS, HPS_CLIP, weights_file
from eval.metrics.networks import Network, effnet, features, inception, read_features, vgg16, write_features
from eval.metrics.pictures import images_of, pairs_of
from eval.metrics.scores import warning_if_not_stored
from eval.metrics.settings import EvaluationSettings
from models.loading import pick_device

CAPTION_PREFIX = "A photo depicts "  # stands before every caption, as in the published evaluation
Scores = dict[str, float]


class Sets:
    """The images of one call, and what is known of them and of the networks that measure them."""

    def __init__(self, options: EvaluationSettings) -> None:
        """Finds the images. Raises UserError if there are too few."""
        self.device, self.batch_size = torch.device(pick_device(options.device)), options.batch_size
        self.weights: dict[str, str] = {}  # digest of every network by name
        self._features: dict[tuple[str, bool], Tensor] = {}
        folder, count = options.fake_dir, options.how_many
        self.pairs, self.fakes, self.reals = [], [], []
        if folder is not None and {"clip", "hps"} & set(options.metrics):
            self.pairs = pairs_of(folder, options.caption_path, count, ("fake_dir", "caption_path"))
            self.fakes = [pair.path for pair in self.pairs]
        elif folder is not None:
            self.fakes = images_of(folder, count, ("fake_dir", "how_many"))
        if options.ref_dir is not None:
            names = ("ref_dir", "ref_how_many")
            self.reals = images_of(options.ref_dir, options.ref_how_many, names, deep=True)
        self.num_reals = len(self.reals)

    def features(self, name: str, network: Network, real: bool = False) -> Tensor:
        """Returns the features [N, D] of the images, or of the real ones; computes them once per network."""
        self.weights[name] = network.digest
        key = name, real
        if key not in self._features:
            self._features[key] = features(network, self.reals if real else self.fakes, self.batch_size)
        return self._features[key]

    def both(self, name: str, network: Network) -> tuple[Tensor, Tensor]:
        """Returns the features of the images and of the real ones."""
        return self.features(name, network), self.features(name, network, real=True)


def _clip(options: EvaluationSettings, sets: Sets) -> Scores:
    place = options.clip_path or CLIPS[options.clip_model4eval]
    clip = load_clip(place, "clip_path", sets.device)
    sets.weights["clip"] = clip.network.digest
    scores = clip_scores(clip, sets.pairs, options.eval_res, CAPTION_PREFIX, options.batch_size)
    return {"clip_score": float(scores.mean())}


def _hps(options: EvaluationSettings, sets: Sets) -> Scores:
    path = weights_file(options.hps_path, "hps_path")
    clip = load_clip(HPS_CLIP, "hps_path", sets.device, path)
    sets.weights["hps"] = clip.network.digest
    return {"hpsv2": float(preference_scores(clip, sets.pairs, options.batch_size).mean())}


def _inception(options: EvaluationSettings, sets: Sets) -> tuple[Network, Tensor]:
    """Returns Inception and the classifier of the Inception Score."""
    path = weights_file(options.inception_path, "inception_path")
    return inception(path, options.eval_res, sets.device)


def _fid(options: EvaluationSettings, sets: Sets) -> Scores:
    fake, real = sets.both("inception", _inception(options, sets)[0])
    return {f"fid_{options.eval_res}px": frechet(fake, real)}


def _kid(options: EvaluationSettings, sets: Sets) -> Scores:
    fake, real = sets.both("inception", _inception(options, sets)[0])
    mean, deviation = kid(fake, real, options.kid_subsets, options.kid_size, options.random_seed)
    return {"kid": mean, "kid_std": deviation}


def _inception_score(options: EvaluationSettings, sets: Sets) -> Scores:
    if len(sets.fakes) < options.splits:
        raise UserError(f"splits {options.splits}: there are {len(sets.fakes)} images; give fewer splits")
    network, classifier = _inception(options, sets)
    logits = sets.features("inception", network) @ classifier
    mean, deviation = inception_score(logits, options.splits, options.random_seed)
    return {"is": mean, "is_std": deviation}


def _aesthetic(options: EvaluationSettings, sets: Sets) -> Scores:
    path = weights_file(options.aesthetic_path, "aesthetic_path")
    clip = load_clip(options.aesthetic_clip, "aesthetic_clip", sets.device)
    sets.weights["aesthetic_clip"] = clip.network.digest
    return {"aesthetic": float(sets.features("aesthetic", aesthetic(clip, path)).mean())}


def _precision_recall(options: EvaluationSettings, sets: Sets) -> Scores:
    network = vgg16(weights_file(options.vgg_path, "vgg_path"), sets.device)
    store = Path(options.fname_precalc) if options.fname_precalc else None
    if store is not None and store.exists():
        real = read_features(store, network.digest, options.ref_how_many)
    else:
        real = sets.features("vgg16", network, real=True)
        if store is not None:
            # Without images to score the file is all that is asked for.
            with warning_if_not_stored() if sets.fakes else nullcontext():
                write_features(store, real, network.digest)
    if not sets.fakes:
        return {}
    sets.num_reals = len(real)
    if (fewest := min(len(sets.fakes), len(real))) <= options.k:
        raise UserError(f"k {options.k}: one set has {fewest} images, no more than k; give a smaller one")
    precision, recall = precision_recall(sets.features("vgg16", network), real, options.k)
    return {"precision": precision, "recall": recall}


def _effnet_fd(options: EvaluationSettings, sets: Sets) -> Scores:
    return {"effnet_fd": frechet(*sets.both("effnet", effnet(sets.device)))}


MEASURES: dict[str, Callable[[EvaluationSettings, Sets], Scores]] = {
    "clip": _clip, "hps": _hps, "fid": _fid, "kid": _kid, "is": _inception_score, "aesthetic": _aesthetic,
    "precision_recall": _precision_recall, "effnet_fd": _effnet_fd,
}  # fmt: skip
