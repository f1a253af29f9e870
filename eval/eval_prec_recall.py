"""eval_prec_recall: precision and recall of images against real ones, on VGG-16 features."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eval.errors import UserError
from eval.metric_options import ANY_SOURCE, VGG16, add_running, count
from eval.outputs import write_atomic
from eval.parser import at_least

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of eval_prec_recall, named as in LANTERN's."""
    group = parser.add_argument_group("eval_prec_recall")
    group.add_argument("--ref_dir", metavar="DIR", help="real images, at any depth")
    group.add_argument(
        "--fake_dir",
        metavar="DIR",
        help="a run's folder, or one of images (default: only write --fname_precalc)",
    )
    group.add_argument("--k", type=at_least(1), default=3, metavar="K", help="which neighbour a ball reaches")
    group.add_argument(
        "--num_samples",
        type=count,
        default=-1,
        metavar="N",
        help="images of either set, fewer are refused; -1: all",
    )
    group.add_argument(
        "--fname_precalc",
        metavar="FILE",
        help=".safetensors file of the real images' features: read if it exists, else written",
    )
    group.add_argument("--vgg_path", default=VGG16, metavar="PLACE", help=f"VGG-16: {ANY_SOURCE}")
    add_running(group, batch_size=50)


def run(args: argparse.Namespace) -> None:
    """Print both and append them; the last line is one JSON document."""
    import torch

    from eval.metrics.distances import precision_recall
    from eval.metrics.networks import features, vgg16
    from eval.metrics.pictures import images_of
    from eval.metrics.scores import Scores
    from eval.metrics.sources import weights_file
    from eval.session import pick_device

    stored = Path(args.fname_precalc) if args.fname_precalc else None
    if args.fake_dir is None and stored is None:
        raise UserError("give --fake_dir, the images to judge, or --fname_precalc, where features shall go")
    known = stored is not None and stored.exists()
    if not known and args.ref_dir is None:
        raise UserError("give --ref_dir, the real images, or the --fname_precalc of an earlier call")
    fakes, reals, number = [], [], args.num_samples
    if args.fake_dir:
        scores = Scores("eval_prec_recall", args.fake_dir, args.scores)
        fakes = images_of(args.fake_dir, number, ("--fake_dir", "--num_samples"))
    if not known:
        reals = images_of(args.ref_dir, number, ("--ref_dir", "--num_samples"), deep=True)
    device = torch.device(pick_device(args.device))
    net = vgg16(weights_file(args.vgg_path, "--vgg_path"), device)
    real = _read(stored, net.digest, number) if known else features(net, reals, device, args.batch_size)
    if stored is not None and not known:
        _write(stored, real, net.digest)
    if not fakes:
        print(f"  {len(real)} rows of features in {stored}")
        return
    if (least := min(len(fakes), len(real))) <= args.k:
        raise UserError(
            f"--k {args.k}: one set has {least} images, it must have more than k; give a smaller --k"
        )
    precision, recall = precision_recall(features(net, fakes, device, args.batch_size), real, args.k)
    facts = {"images": len(fakes), "real_images": len(real), "k": args.k}
    values = {"precision": precision, "recall": recall}
    scores.keep(values, {"vgg16": net.digest}, facts, device.type, vars(args))


def _write(path: Path, features: Tensor, weights: str) -> None:
    """Keep features [N, D] with the digest of the network that made them."""
    from safetensors.torch import save

    write_atomic(path, save({"features": features.contiguous()}, {"weights": weights}))


def _read(path: Path, weights: str, count: int) -> Tensor:
    """The first count rows, all for -1. UserError if there are fewer, or another network made them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            made_by, features = (file.metadata() or {}).get("weights"), file.get_tensor("features")
    except (OSError, SafetensorError) as error:
        what = f"cannot be read ({error})"
    else:
        if made_by == weights and count <= len(features):
            return features if count < 0 else features[:count]
        wrong = made_by != weights
        what = f"made by other weights ({made_by})" if wrong else f"holds {len(features)} rows, not {count}"
    raise UserError(f"--fname_precalc {path}: {what}; delete it, it is made anew")
