"""eval_fid_clip: CLIP score of images and their prompts, FID against real images. Named as in LANTERN's."""

from __future__ import annotations

from dataclasses import MISSING

from cli.options import PAIRED, ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.published import ANY_SOURCE, CLIP_OF, INCEPTION

LEAD = "A photo depicts "  # before every caption, as in the published evaluation


@declare
class Options(ScoringOptions):
    """eval_fid_clip"""

    fake_dir: str = option("a run's folder, or one of images", MISSING, unit="DIR")
    ref_dir: str | None = option("real images, at any depth (default: CLIP score alone, no FID)", unit="DIR")
    caption_path: str | None = option("the prompts (default: those of the run in --fake_dir)", unit="FILE")
    how_many: int = option(PAIRED, 5000, unit="N", read=image_count)
    ref_how_many: int = option("real images; -1: all", -1, unit="N", read=image_count)
    eval_res: int = option("FID's resolution", 256, unit="PIXELS", least=8)
    clip_model4eval: str = option("which CLIP", "ViT-B/32", choices=tuple(CLIP_OF))
    clip_path: str | None = option(
        "folder or hub id in open_clip's layout (default: "
        f"{', '.join(f'{name} {place}' for name, place in CLIP_OF.items())})",
        unit="PLACE",
    )
    inception_path: str = option(f"Inception of FID: {ANY_SOURCE}", INCEPTION, unit="PLACE")


def run(options: Options) -> None:
    """Print the scores and append them; the last line is one JSON document."""
    import torch

    from eval.metrics.clip import clip_scores, load_clip
    from eval.metrics.distances import frechet
    from eval.metrics.networks import features, inception
    from eval.metrics.pictures import images_of, pairs_of
    from eval.metrics.scores import keep, record_of
    from eval.metrics.sources import clip_config, clip_weights, weights_file
    from models.loading import pick_device

    device, batch, size = torch.device(pick_device(options.device)), options.batch_size, options.eval_res
    record = record_of(options.fake_dir, options.scores)
    named = ("--fake_dir", "--caption_path")
    pairs = pairs_of(options.fake_dir, options.caption_path, options.how_many, named)
    real = []
    if options.ref_dir:
        real = images_of(options.ref_dir, options.ref_how_many, ("--ref_dir", "--ref_how_many"), deep=True)
    place = options.clip_path or CLIP_OF[options.clip_model4eval]
    clip = load_clip(clip_config(place, "--clip_path"), clip_weights(place, "--clip_path"), device)
    digests = {"clip": clip.network.digest}
    if real:
        network, _ = inception(weights_file(options.inception_path, "--inception_path"), size, device)
        digests["inception"] = network.digest
    values = {"clip_score": float(clip_scores(clip, pairs, size, LEAD, batch).mean())}
    if real:
        sets = ([pair.path for pair in pairs], real)
        values[f"fid_{size}px"] = frechet(*(features(network, paths, batch) for paths in sets))
    facts = {"images": len(pairs), "real_images": len(real), "clip": place}
    keep(record, "eval_fid_clip", options, device.type, values, digests, facts)
