"""eval_hpsv2: computes the human preference score v2 of images and their prompts. Options as in LANTERN."""

from __future__ import annotations

from dataclasses import MISSING

from cli.options import PAIRED_COUNT, ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.metric_weights import ANY_SOURCE, HPS, HPS_CLIP


@declare
class Options(ScoringOptions):
    """eval_hpsv2"""

    image_path: str = option("a run's folder, or a folder of images", MISSING, unit="DIR")
    prompt_path: str | None = option("file of prompts (default: those of the run)", unit="FILE")
    how_many: int = option(PAIRED_COUNT, -1, unit="N", read=image_count)
    hps_path: str = option(f"weights of HPS: {ANY_SOURCE}", HPS, unit="PLACE")
    batch_size: int = 32


def run(options: Options) -> None:
    """Prints the mean score and appends it to the file --scores."""
    import torch

    from eval.metrics.clip import load_clip, preference_scores
    from eval.metrics.metric_weights import weights_file
    from eval.metrics.pictures import pairs_of
    from eval.metrics.scores import record_scores, scores_path
    from models.loading import pick_device

    device = torch.device(pick_device(options.device))
    record = scores_path(options.image_path, options.scores)
    names = ("--image_path", "--prompt_path")
    pairs = pairs_of(options.image_path, options.prompt_path, options.how_many, names)
    clip = load_clip(HPS_CLIP, "--hps_path", device, weights_file(options.hps_path, "--hps_path"))
    scores = {"hpsv2": float(preference_scores(clip, pairs, options.batch_size).mean())}
    digests = {"hps": clip.network.digest}
    record_scores(record, "eval_hpsv2", options, device.type, scores, digests, {"images": len(pairs)})
