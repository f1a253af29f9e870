"""eval_hpsv2: human preference score v2 of images and their prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

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
        help="folder or hub id of the CLIP it was tuned from, for tokenizer and configuration alone",
    )
    add_running(group, batch_size=32)


def run(args: argparse.Namespace) -> None:
    """Print the mean score and append it; the last line is one JSON document."""
    import torch

    from eval.metrics import pictures, scores
    from eval.metrics.clip_scores import preference_scores
    from eval.metrics.sources import ClipFiles, clip_files, load_clip, weights_file
    from eval.session import pick_device

    folder, device = Path(args.image_path), torch.device(pick_device(args.device))
    scores.place(args, folder)
    prompts = pictures.prompts_of(folder, args.prompt_path, "--prompt_path")
    pairs = pictures.pair(pictures.images_in(folder, "--image_path"), prompts, args.how_many, "--how_many")
    beside = clip_files(args.clip_path, "--clip_path", with_weights=False)
    files = ClipFiles(weights_file(args.hps_path, "--hps_path"), beside.config, beside.tokenizer)
    model = load_clip(files, "--clip_path", True, device)
    values = preference_scores(model, pairs, device, args.batch_size)
    facts = {"command": "eval_hpsv2", "images": len(pairs)}
    scores.keep(args, folder, device.type, {"hpsv2": float(values.mean())}, {"hps": model.digest}, facts)
