"""eval_hpsv2: human preference score v2 of images and their prompts."""

from __future__ import annotations

import argparse

from eval.metric_options import ANY_SOURCE, HPS, HPS_CLIP, add_running, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of eval_hpsv2, named as in LANTERN's."""
    group = parser.add_argument_group("eval_hpsv2")
    group.add_argument("--image_path", required=True, metavar="DIR", help="a run's folder, or one of images")
    group.add_argument(
        "--prompt_path",
        metavar="FILE",
        help="the prompts (default: those that the run in --image_path recorded)",
    )
    group.add_argument(
        "--how_many",
        type=count,
        default=-1,
        metavar="N",
        help="images: of the first N prompts that have one, fewer are refused; -1: all prompts",
    )
    group.add_argument("--hps_path", default=HPS, metavar="PLACE", help=f"HPS checkpoint: {ANY_SOURCE}")
    group.add_argument(
        "--clip_path",
        default=HPS_CLIP,
        metavar="PLACE",
        help="the CLIP it was tuned from: folder or hub id of its open_clip_config.json",
    )
    add_running(group, batch_size=32)


def run(args: argparse.Namespace) -> None:
    """Print the mean score and append it; the last line is one JSON document."""
    import torch

    from eval.metrics.clip import load_clip, preference_scores
    from eval.metrics.pictures import pairs_of
    from eval.metrics.scores import Scores
    from eval.metrics.sources import clip_config, weights_file
    from eval.session import pick_device

    device = torch.device(pick_device(args.device))
    scores = Scores("eval_hpsv2", args.image_path, args.scores)
    pairs = pairs_of(args.image_path, args.prompt_path, args.how_many, ("--image_path", "--prompt_path"))
    config = HPS_CLIP if args.clip_path == HPS_CLIP else clip_config(args.clip_path, "--clip_path")
    model = load_clip(config, weights_file(args.hps_path, "--hps_path"), device)
    values = preference_scores(model, pairs, device, args.batch_size)
    digests = {"hps": model.network.digest}
    scores.keep({"hpsv2": float(values.mean())}, digests, {"images": len(pairs)}, device.type, vars(args))
