"""eval_quality: Inception Score, KID, LAION's aesthetic score and EffNet-FD of a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eval.errors import UserError
from eval.metric_options import AESTHETIC, AESTHETIC_CLIP, ANY_SOURCE, INCEPTION, add_running, count
from eval.parser import at_least

if TYPE_CHECKING:
    from torch import device as Device

Found = tuple[dict[str, float], dict[str, str]]  # scores, digests of the weights behind them
METRICS = ("is", "kid", "fid", "aesthetic", "effnet_fd")
AGAINST_REAL = ("kid", "fid", "effnet_fd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of eval_quality."""
    group = parser.add_argument_group("eval_quality")
    group.add_argument("--fake_dir", required=True, metavar="DIR", help="a run's folder, or one of images")
    group.add_argument(
        "--ref_dir",
        metavar="DIR",
        help=f"images at any depth to compare with: {', '.join(AGAINST_REAL)} need it",
    )
    group.add_argument(
        "--metrics",
        nargs="+",
        choices=METRICS,
        default=["effnet_fd"],
        help="what to compute; effnet_fd is a Frechet distance on EfficientNet-Lite0, which needs no "
        "download, and is no FID",
    )
    group.add_argument(
        "--how_many", type=count, default=-1, metavar="N", help="images, fewer are refused; -1: all"
    )
    group.add_argument("--ref_how_many", type=count, default=-1, metavar="N", help="of --ref_dir; -1: all")
    group.add_argument(
        "--eval_res", type=at_least(8), default=256, metavar="PIXELS", help="of is, kid and fid"
    )
    group.add_argument(
        "--splits", type=at_least(1), default=10, metavar="N", help="parts that is averages over"
    )
    group.add_argument(
        "--kid_subsets", type=at_least(1), default=100, metavar="N", help="that kid averages over"
    )
    group.add_argument(
        "--kid_size", type=at_least(2), default=1000, metavar="N", help="images of one of them"
    )
    group.add_argument("--random_seed", type=int, default=0, metavar="SEED", help="of splits and subsets")
    group.add_argument(
        "--inception_path", default=INCEPTION, metavar="PLACE", help=f"Inception: {ANY_SOURCE}"
    )
    group.add_argument("--aesthetic_path", default=AESTHETIC, metavar="PLACE", help=f"the head: {ANY_SOURCE}")
    group.add_argument(
        "--clip_path",
        default=AESTHETIC_CLIP,
        metavar="PLACE",
        help="folder or hub id of the CLIP below the head",
    )
    add_running(group, batch_size=64)


def run(args: argparse.Namespace) -> None:
    """Print what was asked for and append it; the last line is one JSON document."""
    import torch

    from eval.metrics.pictures import images_of
    from eval.metrics.scores import Scores
    from eval.session import pick_device

    wanted = [name for name in args.metrics if name in AGAINST_REAL]
    if wanted and args.ref_dir is None:
        raise UserError(f"--metrics {wanted[0]} compares with other images: give --ref_dir")
    device, reals = torch.device(pick_device(args.device)), []
    scores = Scores("eval_quality", args.fake_dir, args.scores)
    fakes = images_of(args.fake_dir, args.how_many, ("--fake_dir", "--how_many"))
    if wanted:
        reals = images_of(args.ref_dir, args.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    values: dict[str, float] = {}
    digests: dict[str, str] = {}
    for names, measure in (
        (("is", "kid", "fid"), _inception),
        (("aesthetic",), _aesthetic),
        (("effnet_fd",), _effnet),
    ):
        if set(names) & set(args.metrics):
            found, used = measure(args, fakes, reals, device)
            values, digests = values | found, digests | used
    facts = {"images": len(fakes), "real_images": len(reals)}
    scores.keep(values, digests, facts, device.type, vars(args))


def _inception(args: argparse.Namespace, fakes: list[Path], reals: list[Path], device: Device) -> Found:
    """is, kid and fid, from one pass over the images."""
    from eval.metrics.distances import frechet, inception_score, kid
    from eval.metrics.networks import features, inception
    from eval.metrics.sources import weights_file

    if "is" in args.metrics and len(fakes) < args.splits:
        raise UserError(f"--splits {args.splits}: there are {len(fakes)} images; give fewer splits")
    values: dict[str, float] = {}
    weights = weights_file(args.inception_path, "--inception_path")
    network, head = inception(weights, args.eval_res, device)
    fake = features(network, fakes, device, args.batch_size)
    if "is" in args.metrics:
        values["is"], values["is_std"] = inception_score(fake @ head, args.splits, args.random_seed)
    if {"kid", "fid"} & set(args.metrics):
        real = features(network, reals, device, args.batch_size)
        if "kid" in args.metrics:
            settings = (args.kid_subsets, args.kid_size, args.random_seed)
            values["kid"], values["kid_std"] = kid(fake, real, *settings)
        if "fid" in args.metrics:
            values[f"fid_{args.eval_res}px"] = frechet(fake, real)
    return values, {"inception": network.digest}


def _aesthetic(args: argparse.Namespace, fakes: list[Path], _: list[Path], device: Device) -> Found:
    from eval.metrics.clip import aesthetic, load_clip
    from eval.metrics.networks import features
    from eval.metrics.sources import clip_config, clip_weights, weights_file

    head = weights_file(args.aesthetic_path, "--aesthetic_path")
    place = (args.clip_path, "--clip_path")
    clip = load_clip(clip_config(*place), clip_weights(*place), device)
    network = aesthetic(clip, head, device)
    scores = features(network, fakes, device, args.batch_size)
    digests = {"clip": clip.network.digest, "aesthetic": network.digest}
    return {"aesthetic": float(scores.mean())}, digests


def _effnet(args: argparse.Namespace, fakes: list[Path], reals: list[Path], device: Device) -> Found:
    from eval.metrics.distances import frechet
    from eval.metrics.networks import effnet, features

    network = effnet(device)
    fake, real = (features(network, paths, device, args.batch_size) for paths in (fakes, reals))
    return {"effnet_fd": frechet(fake, real)}, {"effnet": network.digest}
