"""evaluate: scores the images of a run: CLIP, HPS v2, FID, KID, Inception Score and others.

The published commands eval_fid_clip, eval_prec_recall and eval_hpsv2 are this one with other defaults.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from eval.metrics.settings import READS, EvaluationSettings
from storage.command_line import CommandOptions, declare, refuse


@declare("evaluate")
class Options(EvaluationSettings, CommandOptions):
    """What is measured."""


def with_defaults(defaults: dict[str, Any]) -> type[Options]:
    """Returns the options with other defaults."""
    hints = {name: EvaluationSettings.__annotations__[name] for name in defaults}
    return declare("evaluate")(type("Options", (Options,), {**defaults, "__annotations__": hints}))


ALIASES = {  # another name of the command -> its options
    "eval_fid_clip": with_defaults({"metrics": ("clip", "fid"), "how_many": 5000}),
    "eval_prec_recall": with_defaults({"metrics": ("precision_recall",)}),
    "eval_hpsv2": with_defaults({"metrics": ("hps",)}),
    "eval_quality": with_defaults({"metrics": ("effnet_fd",)}),
}


def run(options: Options) -> None:
    """Prints the scores and appends them to the file --scores."""
    if options.num_samples is not None:
        options = replace(options, how_many=options.num_samples, ref_how_many=options.num_samples)
    check(options)
    from eval.metrics.measures import MEASURES, Sets
    from eval.metrics.scores import record_scores, scores_path

    record = scores_path(options.fake_dir or "", options.scores)
    sets, scores = Sets(options), dict[str, float]()
    for name in options.metrics:
        scores |= MEASURES[name](options, sets)
    if options.fake_dir is None:
        print(f"  features of the real images in {options.fname_precalc}")
        return
    facts = {"weights": sets.weights, "images": len(sets.fakes), "real_images": sets.num_reals}
    settings = {name: value for name, value in asdict(options).items() if name not in ("debug", "config")}
    record_scores(record, settings, sets.device.type, facts, scores)


def check(options: Options) -> None:
    """Raises UserError for an option that the metrics lack."""
    if not options.metrics:
        raise UserError(f"--metrics: choose one or more of {', '.join(READS)}")
    precalculated = options.metrics == ("precision_recall",) and options.fname_precalc
    if options.fake_dir is None and not precalculated:
        raise UserError("--fake_dir: give the folder of images to score")
    if precalculated and Path(precalculated).exists():
        refuse(options, "ref_dir", f"--fname_precalc {precalculated} has the features already")
    elif options.ref_dir is None:
        for name in options.metrics:
            if "ref_dir" in READS[name]:
                raise UserError(f"--metrics {name}: it compares with real images: give them by --ref_dir")
