"""eval_hpsv2: human preference score v2 of images and their prompts. Named as in LANTERN's."""

from __future__ import annotations

from dataclasses import MISSING

from cli.options import PAIRED, ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.published import ANY_SOURCE, HPS, HPS_CLIP


@declare
class Options(ScoringOptions):
    """eval_hpsv2"""

    image_path: str = option("a run's folder, or one of images", MISSING, unit="DIR")
    prompt_path: str | None = option("the prompts (default: those of the run in --image_path)", unit="FILE")
    how_many: int = option(PAIRED, -1, unit="N", read=image_count)
    hps_path: str = option(f"HPS checkpoint: {ANY_SOURCE}", HPS, unit="PLACE")
    clip_path: str = option("folder or hub id of the CLIP it was tuned from", HPS_CLIP, unit="PLACE")
    batch_size: int = 32


def run(options: Options) -> None:
    """Print the mean score and append it; the last line is one JSON document."""
    import torch

    from eval.metrics.clip import load_clip, preference_scores
    from eval.metrics.pictures import pairs_of
    from eval.metrics.scores import keep, record_of
    from eval.metrics.sources import clip_config, weights_file
    from models.loading import pick_device

    device, place = torch.device(pick_device(options.device)), options.clip_path
    record = record_of(options.image_path, options.scores)
    named = ("--image_path", "--prompt_path")
    pairs = pairs_of(options.image_path, options.prompt_path, options.how_many, named)
    config = HPS_CLIP if place == HPS_CLIP else clip_config(place, "--clip_path")
    model = load_clip(config, weights_file(options.hps_path, "--hps_path"), device)
    values = {"hpsv2": float(preference_scores(model, pairs, options.batch_size).mean())}
    digests = {"hps": model.network.digest}
    keep(record, "eval_hpsv2", options, device.type, values, digests, {"images": len(pairs)})
