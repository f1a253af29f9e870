"""eval_fid_clip: CLIP score of images and their prompts, FID against real images."""

from __future__ import annotations

import argparse

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

    from eval.metrics.clip import clip_scores, load_clip
    from eval.metrics.distances import frechet
    from eval.metrics.networks import features, inception
    from eval.metrics.pictures import images_of, pairs_of
    from eval.metrics.scores import Scores
    from eval.metrics.sources import clip_config, clip_weights, weights_file
    from eval.session import pick_device

    device = torch.device(pick_device(args.device))
    scores = Scores("eval_fid_clip", args.fake_dir, args.scores)
    pairs = pairs_of(args.fake_dir, args.caption_path, args.how_many, ("--fake_dir", "--caption_path"))
    real = []
    if args.ref_dir:
        real = images_of(args.ref_dir, args.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    place = args.clip_path or CLIP_OF[args.clip_model4eval]
    clip = load_clip(clip_config(place, "--clip_path"), clip_weights(place, "--clip_path"), device)
    digests = {"clip": clip.network.digest}
    if real:
        weights = weights_file(args.inception_path, "--inception_path")
        network, _ = inception(weights, args.eval_res, device)
        digests["inception"] = network.digest
    similar = clip_scores(clip, pairs, args.eval_res, LEAD, device, args.batch_size)
    values = {"clip_score": float(similar.mean())}
    if real:
        sets = ([pair.path for pair in pairs], real)
        rows = [features(network, paths, device, args.batch_size) for paths in sets]
        values[f"fid_{args.eval_res}px"] = frechet(*rows)
    facts = {"images": len(pairs), "real_images": len(real), "clip": place}
    scores.keep(values, digests, facts, device.type, vars(args))
