"""eval_fid_clip: CLIP score of images and their prompts, FID against real images."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.metric_options import ANY_SOURCE, CLIP_OF, INCEPTION, add_running, count
from eval.parser import at_least

LEAD = "A photo depicts "  # before every caption, as in the published evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of eval_fid_clip, named as in LANTERN's."""
    group = parser.add_argument_group("eval_fid_clip")
    group.add_argument("--fake_dir", required=True, metavar="DIR", help="a run's folder, or one of images")
    group.add_argument(
        "--ref_dir", metavar="DIR", help="real images, at any depth (default: CLIP score alone, no FID)"
    )
    group.add_argument(
        "--caption_path",
        metavar="FILE",
        help="the prompts (default: those that the run in --fake_dir recorded)",
    )
    group.add_argument(
        "--how_many",
        type=count,
        default=5000,
        metavar="N",
        help="images: of the first N prompts that have one, fewer are refused; -1: all prompts",
    )
    group.add_argument("--ref_how_many", type=count, default=-1, metavar="N", help="real images; -1: all")
    group.add_argument("--eval_res", type=at_least(8), default=256, metavar="PIXELS", help="FID's resolution")
    group.add_argument("--clip_model4eval", choices=tuple(CLIP_OF), default="ViT-B/32", help="which CLIP")
    group.add_argument(
        "--clip_path",
        metavar="PLACE",
        help="folder or hub id in open_clip's layout (default: that of --clip_model4eval: "
        f"{', '.join(f'{name} {place}' for name, place in CLIP_OF.items())})",
    )
    group.add_argument(
        "--inception_path", default=INCEPTION, metavar="PLACE", help=f"Inception of FID: {ANY_SOURCE}"
    )
    add_running(group, batch_size=64)


def run(args: argparse.Namespace) -> None:
    """Print the scores and append them; the last line is one JSON document."""
    import torch

    from eval.metrics import pictures, scores
    from eval.metrics.clip_scores import clip_scores
    from eval.metrics.distances import frechet
    from eval.metrics.inception import Inception
    from eval.metrics.sets import inception_features, paths_of
    from eval.metrics.sources import clip_files, load_clip, weights_file
    from eval.session import pick_device

    fake, device = Path(args.fake_dir), torch.device(pick_device(args.device))
    scores.place(args, fake)
    prompts = pictures.prompts_of(fake, args.caption_path, "--caption_path")
    images = pictures.images_in(fake, "--fake_dir")
    pairs = pictures.pair(images, prompts, args.how_many, "--how_many")
    real = (
        pictures.reference_images(args.ref_dir, args.ref_how_many, "--ref_how_many") if args.ref_dir else []
    )
    clip_place = args.clip_path or CLIP_OF[args.clip_model4eval]
    clip = load_clip(clip_files(clip_place, "--clip_path"), "--clip_path", True, device)
    weights = {"clip": clip.digest}
    inception = None
    if real:
        inception = Inception(weights_file(args.inception_path, "--inception_path"), device)
        weights["inception"] = inception.digest
    similar = clip_scores(clip, pairs, args.eval_res, LEAD, device, args.batch_size)
    values = {"clip_score": float(similar.mean())}
    if inception is not None:
        sets = (paths_of(pairs), real)
        features = [
            inception_features(inception, paths, args.eval_res, device, args.batch_size) for paths in sets
        ]
        values[f"fid_{args.eval_res}px"] = frechet(*features)
    facts = {"command": "eval_fid_clip", "images": len(pairs), "real_images": len(real), "clip": clip_place}
    scores.keep(args, fake, device.type, values, weights, facts)
