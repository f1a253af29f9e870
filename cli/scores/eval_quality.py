"""eval_quality: computes Inception Score, KID, FID, LAION's aesthetic score and EffNet-FD of images."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.metric_weights import AESTHETIC, AESTHETIC_CLIP, ANY_SOURCE, INCEPTION

if TYPE_CHECKING:
    from torch import device as Device

Scores = tuple[dict[str, float], dict[str, str]]  # scores by name, digests of the networks behind them
METRICS = ("is", "kid", "fid", "aesthetic", "effnet_fd")
AGAINST_REAL = ("kid", "fid", "effnet_fd")


@declare
class Options(ScoringOptions):
    """eval_quality"""

    fake_dir: str = option("a run's folder, or a folder of images", MISSING, unit="DIR")
    ref_dir: str | None = option(
        f"folder of images to compare with, searched at any depth; {', '.join(AGAINST_REAL)} need it",
        unit="DIR",
    )
    metrics: tuple[str, ...] = option(
        "effnet_fd is a Frechet distance on EfficientNet-Lite0, which needs no download; it is not FID",
        ("effnet_fd",),
        choices=METRICS,
    )
    how_many: int = option("number of images; fewer are an error; -1: all", -1, unit="N", read=image_count)
    ref_how_many: int = option("number of images of --ref_dir; -1: all", -1, unit="N", read=image_count)
    eval_res: int = option("side of the images for is, kid and fid", 256, unit="PIXELS", least=8)
    splits: int = option("is: number of parts to average over", 10, unit="N", least=1)
    kid_subsets: int = option("kid: number of subsets to average over", 100, unit="N", least=1)
    kid_size: int = option("kid: images in a subset", 1000, unit="N", least=2)
    random_seed: int = option("seed of the parts of is and the subsets of kid", 0, unit="SEED")
    inception_path: str = option(f"weights of Inception: {ANY_SOURCE}", INCEPTION, unit="PLACE")
    aesthetic_path: str = option(f"weights of the aesthetic predictor: {ANY_SOURCE}", AESTHETIC, unit="PLACE")
    clip_path: str = option("folder or hub id of the predictor's CLIP", AESTHETIC_CLIP, unit="PLACE")


def run(options: Options) -> None:
    """Prints the chosen scores and appends them to the file --scores."""
    import torch

    from eval.metrics.pictures import images_of
    from eval.metrics.scores import record_scores, scores_path
    from models.loading import pick_device

    comparing = [name for name in options.metrics if name in AGAINST_REAL]
    if comparing and options.ref_dir is None:
        raise UserError(f"--metrics {comparing[0]} compares with other images: give --ref_dir")
    device, reals = torch.device(pick_device(options.device)), []
    record = scores_path(options.fake_dir, options.scores)
    fakes = images_of(options.fake_dir, options.how_many, ("--fake_dir", "--how_many"))
    if comparing:
        reals = images_of(options.ref_dir, options.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    scores: dict[str, float] = {}
    digests: dict[str, str] = {}
    for measure, names in MEASURES.items():
        if names & set(options.metrics):
            more_scores, more_digests = measure(options, fakes, reals, device)
            scores, digests = scores | more_scores, digests | more_digests
    facts = {"images": len(fakes), "real_images": len(reals)}
    record_scores(record, "eval_quality", options, device.type, scores, digests, facts)


def _inception(options: Options, fakes: list[Path], reals: list[Path], device: Device) -> Scores:
    """Computes is, kid and fid in one pass over the images."""
    from eval.metrics import distances, metric_weights, networks

    if "is" in options.metrics and len(fakes) < options.splits:
        raise UserError(f"--splits {options.splits}: there are {len(fakes)} images; give fewer splits")
    scores: dict[str, float] = {}
    path, seed = metric_weights.weights_file(options.inception_path, "--inception_path"), options.random_seed
    network, classifier = networks.inception(path, options.eval_res, device)
    fake = networks.features(network, fakes, options.batch_size)
    if "is" in options.metrics:
        scores["is"], scores["is_std"] = distances.inception_score(fake @ classifier, options.splits, seed)
    if {"kid", "fid"} & set(options.metrics):
        real = networks.features(network, reals, options.batch_size)
    if "kid" in options.metrics:
        subsets, size = options.kid_subsets, options.kid_size
        scores["kid"], scores["kid_std"] = distances.kid(fake, real, subsets, size, seed)
    if "fid" in options.metrics:
        scores[f"fid_{options.eval_res}px"] = distances.frechet(fake, real)
    return scores, {"inception": network.digest}


def _aesthetic(options: Options, fakes: list[Path], _: list[Path], device: Device) -> Scores:
    from eval.metrics import clip, metric_weights, networks

    path = metric_weights.weights_file(options.aesthetic_path, "--aesthetic_path")
    model = clip.load_clip(options.clip_path, "--clip_path", device)
    network = clip.aesthetic(model, path)
    scores = networks.features(network, fakes, options.batch_size)
    digests = {"clip": model.network.digest, "aesthetic": network.digest}
    return {"aesthetic": float(scores.mean())}, digests


def _effnet(options: Options, fakes: list[Path], reals: list[Path], device: Device) -> Scores:
    from eval.metrics import distances, networks

    network = networks.effnet(device)
    fake, real = (networks.features(network, paths, options.batch_size) for paths in (fakes, reals))
    return {"effnet_fd": distances.frechet(fake, real)}, {"effnet": network.digest}


MEASURES = {_inception: {"is", "kid", "fid"}, _aesthetic: {"aesthetic"}, _effnet: {"effnet_fd"}}
