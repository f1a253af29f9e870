"""eval_prec_recall: precision and recall of images against real ones, on VGG-16 features."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.errors import UserError
from eval.metric_options import ANY_SOURCE, VGG16, add_running, count
from eval.parser import at_least


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

    from eval.metrics import pictures, scores
    from eval.metrics.distances import precision_recall
    from eval.metrics.sets import vgg_features
    from eval.metrics.sources import weights_file
    from eval.metrics.stored import read_features, write_features
    from eval.metrics.vgg import VGG
    from eval.session import pick_device

    stored = Path(args.fname_precalc) if args.fname_precalc else None
    if args.fake_dir is None and stored is None:
        raise UserError("give --fake_dir, the images to judge, or --fname_precalc, where features shall go")
    known = stored is not None and stored.exists()
    if not known and args.ref_dir is None:
        raise UserError("give --ref_dir, the real images, or the --fname_precalc of an earlier call")
    fake = Path(args.fake_dir) if args.fake_dir else None
    if fake is not None:
        scores.place(args, fake)
    fakes = pictures.unpaired(fake, args.num_samples, ("--fake_dir", "--num_samples")) if fake else []
    reals = [] if known else pictures.reference_images(args.ref_dir, args.num_samples, "--num_samples")
    device = torch.device(pick_device(args.device))
    net = VGG(weights_file(args.vgg_path, "--vgg_path"), device)
    if known:
        real = read_features(stored, net.digest, args.num_samples)
    else:
        real = vgg_features(net, reals, device, args.batch_size)
        if stored is not None:
            write_features(stored, real, net.digest)
    if fake is None:
        print(f"  {len(real)} rows of features in {stored}")
        return
    least = min(len(fakes), len(real))
    if least <= args.k:
        raise UserError(
            f"--k {args.k}: one set has {least} images, it must have more than k; give a smaller --k"
        )
    precision, recall = precision_recall(vgg_features(net, fakes, device, args.batch_size), real, args.k)
    facts = {"command": "eval_prec_recall", "images": len(fakes), "real_images": len(real), "k": args.k}
    values = {"precision": precision, "recall": recall}
    scores.keep(args, fake, device.type, values, {"vgg16": net.digest}, facts)
