"""eval_quality: Inception Score, KID, LAION's aesthetic score and EffNet-FD of a folder of images."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.published import AESTHETIC, AESTHETIC_CLIP, ANY_SOURCE, INCEPTION

if TYPE_CHECKING:
    from torch import device as Device

Found = tuple[dict[str, float], dict[str, str]]  # scores, digests of the weights behind them
METRICS = ("is", "kid", "fid", "aesthetic", "effnet_fd")
AGAINST_REAL = ("kid", "fid", "effnet_fd")


@declare
class Options(ScoringOptions):
    """eval_quality"""

    fake_dir: str = option("a run's folder, or one of images", MISSING, unit="DIR")
    ref_dir: str | None = option(
        f"images at any depth to compare with: {', '.join(AGAINST_REAL)} need it", unit="DIR"
    )
    metrics: tuple[str, ...] = option(
        "effnet_fd is a Frechet distance on EfficientNet-Lite0, which needs no download, and no FID",
        ("effnet_fd",),
        choices=METRICS,
    )
    how_many: int = option("images, fewer are refused; -1: all", -1, unit="N", read=image_count)
    ref_how_many: int = option("of --ref_dir; -1: all", -1, unit="N", read=image_count)
    eval_res: int = option("of is, kid and fid", 256, unit="PIXELS", least=8)
    splits: int = option("parts that is averages over", 10, unit="N", least=1)
    kid_subsets: int = option("that kid averages over", 100, unit="N", least=1)
    kid_size: int = option("images of one of them", 1000, unit="N", least=2)
    random_seed: int = option("of splits and subsets", 0, unit="SEED")
    inception_path: str = option(f"Inception: {ANY_SOURCE}", INCEPTION, unit="PLACE")
    aesthetic_path: str = option(f"the head: {ANY_SOURCE}", AESTHETIC, unit="PLACE")
    clip_path: str = option("folder or hub id of the CLIP below the head", AESTHETIC_CLIP, unit="PLACE")


def run(options: Options) -> None:
    """Print what was asked for and append it; the last line is one JSON document."""
    import torch

    from eval.metrics.pictures import images_of
    from eval.metrics.scores import keep, record_of
    from models.loading import pick_device

    wanted = [name for name in options.metrics if name in AGAINST_REAL]
    if wanted and options.ref_dir is None:
        raise UserError(f"--metrics {wanted[0]} compares with other images: give --ref_dir")
    device, reals = torch.device(pick_device(options.device)), []
    record = record_of(options.fake_dir, options.scores)
    fakes = images_of(options.fake_dir, options.how_many, ("--fake_dir", "--how_many"))
    if wanted:
        reals = images_of(options.ref_dir, options.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    values: dict[str, float] = {}
    digests: dict[str, str] = {}
    for measure, names in MEASURES.items():
        if names & set(options.metrics):
            found, used = measure(options, fakes, reals, device)
            values, digests = values | found, digests | used
    facts = {"images": len(fakes), "real_images": len(reals)}
    keep(record, "eval_quality", options, device.type, values, digests, facts)


def _inception(options: Options, fakes: list[Path], reals: list[Path], device: Device) -> Found:
    """is, kid and fid, from one pass over the images."""
    from eval.metrics import distances, networks, sources

    if "is" in options.metrics and len(fakes) < options.splits:
        raise UserError(f"--splits {options.splits}: there are {len(fakes)} images; give fewer splits")
    values: dict[str, float] = {}
    weights, seed = sources.weights_file(options.inception_path, "--inception_path"), options.random_seed
    network, head = networks.inception(weights, options.eval_res, device)
    fake = networks.features(network, fakes, options.batch_size)
    if "is" in options.metrics:
        values["is"], values["is_std"] = distances.inception_score(fake @ head, options.splits, seed)
    if {"kid", "fid"} & set(options.metrics):
        real = networks.features(network, reals, options.batch_size)
    if "kid" in options.metrics:
        subsets, size = options.kid_subsets, options.kid_size
        values["kid"], values["kid_std"] = distances.kid(fake, real, subsets, size, seed)
    if "fid" in options.metrics:
        values[f"fid_{options.eval_res}px"] = distances.frechet(fake, real)
    return values, {"inception": network.digest}


def _aesthetic(options: Options, fakes: list[Path], _: list[Path], device: Device) -> Found:
    from eval.metrics import clip, networks, sources

    head = sources.weights_file(options.aesthetic_path, "--aesthetic_path")
    place = (options.clip_path, "--clip_path")
    below = clip.load_clip(sources.clip_config(*place), sources.clip_weights(*place), device)
    network = clip.aesthetic(below, head)
    scores = networks.features(network, fakes, options.batch_size)
    digests = {"clip": below.network.digest, "aesthetic": network.digest}
    return {"aesthetic": float(scores.mean())}, digests


def _effnet(options: Options, fakes: list[Path], reals: list[Path], device: Device) -> Found:
    from eval.metrics import distances, networks

    network = networks.effnet(device)
    fake, real = (networks.features(network, paths, options.batch_size) for paths in (fakes, reals))
    return {"effnet_fd": distances.frechet(fake, real)}, {"effnet": network.digest}


MEASURES = {_inception: {"is", "kid", "fid"}, _aesthetic: {"aesthetic"}, _effnet: {"effnet_fd"}}
