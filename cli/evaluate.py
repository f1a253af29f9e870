"""evaluate: scores the images of a run: CLIP, HPS v2, FID, KID, Inception Score and others.

The published commands eval_fid_clip, eval_prec_recall and eval_hpsv2 are this one with other defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import UserError
from eval.metrics.metric_weights import (
    AESTHETIC,
    AESTHETIC_CLIP,
    ANY_SOURCE,
    CLIPS,
    HPS,
    HPS_CLIP,
    INCEPTION,
    VGG16,
    weights_file,
)
from models.family import DEVICES
from storage.command_line import CommandOptions, declare, option, refuse
from storage.prompt_settings import image_count

if TYPE_CHECKING:
    from torch import Tensor

    from eval.metrics.networks import Network

REAL, RESIZED = ("ref_dir", "ref_how_many"), ("eval_res", "inception_path")
READS = {  # metric -> the options that only some metrics read
    "clip": ("caption_path", "eval_res", "clip_model4eval", "clip_path"),
    "hps": ("caption_path", "hps_path"),
    "fid": (*REAL, *RESIZED),
    "kid": (*REAL, *RESIZED, "kid_subsets", "kid_size", "random_seed"),
    "is": (*RESIZED, "splits", "random_seed"),
    "aesthetic": ("aesthetic_path", "aesthetic_clip"),
    "precision_recall": (*REAL, "k", "fname_precalc", "vgg_path"),
    "effnet_fd": REAL,
}
CAPTION_PREFIX = "A photo depicts "  # stands before every caption, as in the published evaluation
Scores = dict[str, float]


@declare("evaluate", {"image_path": "fake_dir", "prompt_path": "caption_path"})
class Options(CommandOptions):
    """The images, what they are compared with, and by which metrics."""

    metrics: tuple[str, ...] = option(
        "clip, hps: agreement with the prompts; fid, kid, precision_recall: likeness to real images; is; "
        "aesthetic: LAION's predictor; effnet_fd: a Frechet distance on EfficientNet-Lite0, which needs no "
        "download and is not FID",
        (),
        choices=tuple(READS),
        reads=READS,
    )
    fake_dir: str | None = option(
        "a run's folder, or a folder of images; --image_path says the same (precision_recall without it only "
        "writes --fname_precalc)",
        unit="DIR",
        reads={True: ("how_many", "k", "scores")},
    )
    ref_dir: str | None = option(
        "folder of real images, searched at any depth; fid, kid, precision_recall and effnet_fd need it",
        unit="DIR",
    )
    caption_path: str | None = option(
        "file of prompts; --prompt_path says the same (default: those of the run)", unit="FILE"
    )
    how_many: int = option(
        "number of images, with clip and hps of prompts that have an image; fewer are an error; -1: all",
        -1,
        unit="N",
        read=image_count,
    )
    ref_how_many: int = option("number of real images; -1: all", -1, unit="N", read=image_count)
    num_samples: int | None = option(
        "--how_many and --ref_how_many at once",
        unit="N",
        read=image_count,
        reads={False: ("how_many", "ref_how_many")},
    )
    eval_res: int = option(
        "side to which images are resized for clip, fid, kid and is", 256, unit="PIXELS", least=8
    )
    k: int = option(
        "precision_recall: an image matches those of the other set that lie no farther away than its own "
        "K-th neighbour",
        3,
        unit="K",
        least=1,
    )
    fname_precalc: str | None = option(
        "precision_recall: .safetensors file of the real images' features: read if it exists, else written",
        unit="FILE",
    )
    splits: int = option("is: number of parts to average over", 10, unit="N", least=1)
    kid_subsets: int = option("kid: number of subsets to average over", 100, unit="N", least=1)
    kid_size: int = option("kid: images in a subset", 1000, unit="N", least=2)
    random_seed: int = option("seed of the parts of is and the subsets of kid", 0, unit="SEED")
    clip_model4eval: str = option("clip: name of the CLIP model", "ViT-B/32", choices=tuple(CLIPS))
    clip_path: str | None = option(
        "clip: folder or hub id of the CLIP model in open_clip's layout (default: "
        f"{', '.join(f'{name} {place}' for name, place in CLIPS.items())})",
        unit="PLACE",
        reads={False: ("clip_model4eval",)},
    )
    hps_path: str = option(f"weights of HPS: {ANY_SOURCE}", HPS, unit="PLACE")
    inception_path: str = option(f"weights of Inception: {ANY_SOURCE}", INCEPTION, unit="PLACE")
    vgg_path: str = option(f"weights of VGG-16: {ANY_SOURCE}", VGG16, unit="PLACE")
    aesthetic_path: str = option(f"weights of the aesthetic predictor: {ANY_SOURCE}", AESTHETIC, unit="PLACE")
    aesthetic_clip: str = option(
        "folder or hub id of the aesthetic predictor's CLIP", AESTHETIC_CLIP, unit="PLACE"
    )
    batch_size: int = option("images that a network takes at once", 64, unit="IMAGES", least=1)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    scores: str | None = option(
        "file to which scores are appended (default: scores.jsonl beside the images)", unit="FILE"
    )


def with_defaults(defaults: dict[str, Any]) -> type[Options]:
    """Returns the options with other defaults."""
    hints = {name: Options.__annotations__[name] for name in defaults}
    return declare("evaluate")(type("Options", (Options,), {**defaults, "__annotations__": hints}))


ALIASES = {  # another name of the command -> its options
    "eval_fid_clip": with_defaults({"metrics": ("clip", "fid"), "how_many": 5000}),
    "eval_prec_recall": with_defaults({"metrics": ("precision_recall",)}),
    "eval_hpsv2": with_defaults({"metrics": ("hps",)}),
    "eval_quality": with_defaults({"metrics": ("effnet_fd",)}),
}


def run(options: Options) -> None:
    """Prints the scores and appends them to the file --scores."""
    if options.num_samples is not None:
        options = replace(options, how_many=options.num_samples, ref_how_many=options.num_samples)
    check(options)
    from eval.metrics.scores import record_scores, scores_path

    record = scores_path(options.fake_dir or "", options.scores)
    sets, scores = Sets(options), Scores()
    for name in options.metrics:
        scores |= MEASURES[name](options, sets)
    if options.fake_dir is None:
        print(f"  features of the real images in {options.fname_precalc}")
        return
    facts = {"weights": sets.weights, "images": len(sets.fakes), "real_images": sets.num_reals}
    settings = {name: value for name, value in asdict(options).items() if name not in ("debug", "config")}
    record_scores(record, settings, sets.device.type, facts, scores)


def check(options: Options) -> None:
    """Raises UserError for an option that the metrics lack."""
    if not options.metrics:
        raise UserError(f"--metrics: choose one or more of {', '.join(READS)}")
    precalculated = options.metrics == ("precision_recall",) and options.fname_precalc
    if options.fake_dir is None and not precalculated:
        raise UserError("--fake_dir: give the folder of images to score")
    if precalculated and Path(precalculated).exists():
        refuse(options, "ref_dir", f"--fname_precalc {precalculated} has the features already")
    elif options.ref_dir is None:
        for name in options.metrics:
            if "ref_dir" in READS[name]:
                raise UserError(f"--metrics {name}: it compares with real images: give them by --ref_dir")


class Sets:
    """The images of one call, and what is known of them and of the networks that measure them."""

    def __init__(self, options: Options) -> None:
        """Finds the images. Raises UserError if there are too few."""
        import torch

        from eval.metrics.pictures import images_of, pairs_of
        from models.loading import pick_device

        self.device, self.batch_size = torch.device(pick_device(options.device)), options.batch_size
        self.weights: dict[str, str] = {}  # digest of every network by name
        self._features: dict[tuple[str, bool], Tensor] = {}
        folder, count = options.fake_dir, options.how_many
        self.pairs, self.fakes, self.reals = [], [], []
        if folder is not None and {"clip", "hps"} & set(options.metrics):
            self.pairs = pairs_of(folder, options.caption_path, count, ("--fake_dir", "--caption_path"))
            self.fakes = [pair.path for pair in self.pairs]
        elif folder is not None:
            self.fakes = images_of(folder, count, ("--fake_dir", "--how_many"))
        if options.ref_dir is not None:
            names = ("--ref_dir", "--ref_how_many")
            self.reals = images_of(options.ref_dir, options.ref_how_many, names, deep=True)
        self.num_reals = len(self.reals)

    def features(self, name: str, network: Network, real: bool = False) -> Tensor:
        """Returns the features [N, D] of the images, or of the real ones; computes them once per network."""
        from eval.metrics.networks import features

        self.weights[name] = network.digest
        key = name, real
        if key not in self._features:
            self._features[key] = features(network, self.reals if real else self.fakes, self.batch_size)
        return self._features[key]

    def both(self, name: str, network: Network) -> tuple[Tensor, Tensor]:
        """Returns the features of the images and of the real ones."""
        return self.features(name, network), self.features(name, network, real=True)


def _clip(options: Options, sets: Sets) -> Scores:
    from eval.metrics.clip import clip_scores, load_clip

    place = options.clip_path or CLIPS[options.clip_model4eval]
    clip = load_clip(place, "--clip_path", sets.device)
    sets.weights["clip"] = clip.network.digest
    scores = clip_scores(clip, sets.pairs, options.eval_res, CAPTION_PREFIX, options.batch_size)
    return {"clip_score": float(scores.mean())}


def _hps(options: Options, sets: Sets) -> Scores:
    from eval.metrics.clip import load_clip, preference_scores

    path = weights_file(options.hps_path, "--hps_path")
    clip = load_clip(HPS_CLIP, "--hps_path", sets.device, path)
    sets.weights["hps"] = clip.network.digest
    return {"hpsv2": float(preference_scores(clip, sets.pairs, options.batch_size).mean())}


def _inception(options: Options, sets: Sets) -> tuple[Network, Tensor]:
    """Returns Inception and the classifier of the Inception Score."""
    from eval.metrics.networks import inception

    path = weights_file(options.inception_path, "--inception_path")
    return inception(path, options.eval_res, sets.device)


def _fid(options: Options, sets: Sets) -> Scores:
    from eval.metrics.distances import frechet

    fake, real = sets.both("inception", _inception(options, sets)[0])
    return {f"fid_{options.eval_res}px": frechet(fake, real)}


def _kid(options: Options, sets: Sets) -> Scores:
    from eval.metrics.distances import kid

    fake, real = sets.both("inception", _inception(options, sets)[0])
    mean, deviation = kid(fake, real, options.kid_subsets, options.kid_size, options.random_seed)
    return {"kid": mean, "kid_std": deviation}


def _inception_score(options: Options, sets: Sets) -> Scores:
    from eval.metrics.distances import inception_score

    if len(sets.fakes) < options.splits:
        raise UserError(f"--splits {options.splits}: there are {len(sets.fakes)} images; give fewer splits")
    network, classifier = _inception(options, sets)
    logits = sets.features("inception", network) @ classifier
    mean, deviation = inception_score(logits, options.splits, options.random_seed)
    return {"is": mean, "is_std": deviation}


def _aesthetic(options: Options, sets: Sets) -> Scores:
    from eval.metrics.clip import aesthetic, load_clip

    path = weights_file(options.aesthetic_path, "--aesthetic_path")
    clip = load_clip(options.aesthetic_clip, "--aesthetic_clip", sets.device)
    sets.weights["aesthetic_clip"] = clip.network.digest
    return {"aesthetic": float(sets.features("aesthetic", aesthetic(clip, path)).mean())}


def _precision_recall(options: Options, sets: Sets) -> Scores:
    from eval.metrics.distances import precision_recall
    from eval.metrics.networks import read_features, vgg16, write_features
    from eval.metrics.scores import warning_if_not_stored

    network = vgg16(weights_file(options.vgg_path, "--vgg_path"), sets.device)
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
        raise UserError(f"--k {options.k}: one set has {fewest} images, no more than k; give a smaller --k")
    precision, recall = precision_recall(sets.features("vgg16", network), real, options.k)
    return {"precision": precision, "recall": recall}


def _effnet_fd(options: Options, sets: Sets) -> Scores:
    from eval.metrics.distances import frechet
    from eval.metrics.networks import effnet

    return {"effnet_fd": frechet(*sets.both("effnet", effnet(sets.device)))}


MEASURES: dict[str, Callable[[Options, Sets], Scores]] = {
    "clip": _clip, "hps": _hps, "fid": _fid, "kid": _kid, "is": _inception_score, "aesthetic": _aesthetic,
    "precision_recall": _precision_recall, "effnet_fd": _effnet_fd,
}  # fmt: skip
