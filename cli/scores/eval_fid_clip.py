"""eval_fid_clip: computes the CLIP score of images and their prompts, and their FID against real images.

Its options are named as in LANTERN's code.
"""

from __future__ import annotations

from dataclasses import MISSING

from cli.options import PAIRED_COUNT, ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.metric_weights import ANY_SOURCE, CLIPS, INCEPTION

CAPTION_PREFIX = "A photo depicts "  # stands before every caption, as in the published evaluation


@declare
class Options(ScoringOptions):
    """eval_fid_clip"""

    fake_dir: str = option("a run's folder, or a folder of images", MISSING, unit="DIR")
    ref_dir: str | None = option(
        "folder of real images, searched at any depth (default: no FID, the CLIP score alone)", unit="DIR"
    )
    caption_path: str | None = option("file of prompts (default: those of the run)", unit="FILE")
    how_many: int = option(PAIRED_COUNT, 5000, unit="N", read=image_count)
    ref_how_many: int = option("number of real images; -1: all", -1, unit="N", read=image_count)
    eval_res: int = option("side to which images are resized", 256, unit="PIXELS", least=8)
    clip_model4eval: str = option("name of the CLIP model", "ViT-B/32", choices=tuple(CLIPS))
    clip_path: str | None = option(
        "folder or hub id of the CLIP model in open_clip's layout (default: "
        f"{', '.join(f'{name} {place}' for name, place in CLIPS.items())})",
        unit="PLACE",
    )
    inception_path: str = option(f"weights of FID's Inception: {ANY_SOURCE}", INCEPTION, unit="PLACE")


def run(options: Options) -> None:
    """Prints the scores and appends them to the file --scores."""
    import torch

    from eval.metrics.clip import clip_scores, load_clip
    from eval.metrics.distances import frechet
    from eval.metrics.metric_weights import weights_file
    from eval.metrics.networks import features, inception
    from eval.metrics.pictures import images_of, pairs_of
    from eval.metrics.scores import record_scores, scores_path
    from models.loading import pick_device

    device, batch, side = torch.device(pick_device(options.device)), options.batch_size, options.eval_res
    record = scores_path(options.fake_dir, options.scores)
    names = ("--fake_dir", "--caption_path")
    pairs = pairs_of(options.fake_dir, options.caption_path, options.how_many, names)
    real = []
    if options.ref_dir:
        real = images_of(options.ref_dir, options.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    place = options.clip_path or CLIPS[options.clip_model4eval]
    clip = load_clip(place, "--clip_path", device)
    digests = {"clip": clip.network.digest}
    if real:  # load it before anything is measured, so that a damaged file is reported at once
        network, _ = inception(weights_file(options.inception_path, "--inception_path"), side, device)
        digests["inception"] = network.digest
    scores = {"clip_score": float(clip_scores(clip, pairs, side, CAPTION_PREFIX, batch).mean())}
    if real:
        sets = ([pair.path for pair in pairs], real)
        scores[f"fid_{side}px"] = frechet(*(features(network, paths, batch) for paths in sets))
    facts = {"images": len(pairs), "real_images": len(real), "clip": place}
    record_scores(record, "eval_fid_clip", options, device.type, scores, digests, facts)
