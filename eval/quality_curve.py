"""quality_curve: what relaxed acceptance costs in images for what it gains in speed, beside plain decoding.

The yardstick is plain decoding itself under two seeds: an arm whose images are as far from another seed's as
plain decoding's own are has lost nothing that this distance sees. Distances are EffNet-FD, which is no FID.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import markdown
from eval.errors import UserError
from eval.metric_options import add_running
from eval.outputs import tau_of, write_json

if TYPE_CHECKING:
    from torch import Tensor

LAW = ("model", "weights", "temperature", "top_k", "top_p", "cfg", "precision")  # what all runs must share
RESULT = "table3_quality.json"
HEADINGS = (
    "arm", "delta", "k", "tau", "= AR", "pixels = AR", "FD, same seed", "FD, other seeds", "KID x 1000",
)  # fmt: skip
YARDSTICK = "plain decoding, another seed"


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of generate_images."""

    folder: Path
    settings: Mapping[str, Any]  # what determines its images
    entries: Mapping[str, Mapping[str, Any]]  # its statistics, by prompt
    paths: Mapping[str, Path]

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.settings["random_seed"]

    @property
    def delta(self) -> float | None:
        """LANTERN's budget; None for an exact rule."""
        lantern = self.settings["lantern"]
        return lantern["delta"] if lantern else None

    @property
    def neighbours(self) -> int | None:
        """How many of a code's neighbours LANTERN looks at; None for an exact rule."""
        lantern = self.settings["lantern"]
        return lantern["k"] if lantern else None

    @property
    def tau(self) -> float:
        """Codes a target call."""
        return tau_of(self.entries.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of quality_curve."""
    group = parser.add_argument_group(
        "quality_curve", "Folders are runs of generate_images on the same prompts."
    )
    group.add_argument("--base", required=True, metavar="DIR", help="plain decoding, at the arms' seed")
    group.add_argument(
        "--others",
        required=True,
        nargs="+",
        metavar="DIR",
        help="plain decoding at other seeds, all different",
    )
    group.add_argument(
        "--arms", required=True, nargs="+", metavar="DIR", help="methods, at the seed of --base"
    )
    group.add_argument(
        "--output_dir",
        default="runs/quality",
        metavar="DIR",
        help=f"for {RESULT} and quality_speed.png",
    )
    add_running(group, batch_size=32)


def run(args: argparse.Namespace) -> None:
    """Print the table; store it and the plot. The last line is one JSON document."""
    import torch

    from eval.figures import quality
    from eval.metrics.effnet import EffNet
    from eval.metrics.sets import effnet_features
    from eval.session import environment, pick_device

    base, others, arms = read_run(args.base), [*map(read_run, args.others)], [*map(read_run, args.arms)]
    check(base, others, arms)
    device = torch.device(pick_device(args.device))
    net, names = EffNet(device), list(base.entries)
    features = {
        run.folder: effnet_features(net, [run.paths[name] for name in names], device, args.batch_size)
        for run in (base, *others, *arms)
    }
    rows = rows_of(base, others, arms, features)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    result = {
        **environment(device.type),
        "command": "quality_curve",
        "images": len(names),
        "law": {name: base.settings[name] for name in LAW},
        "weights": {"effnet": net.digest},
        "results": rows,
    }
    write_json(output / RESULT, result)
    quality(rows, output / "quality_speed.png")
    print(text_of(result))
    print(json.dumps(result))


def read_result(path: Path) -> dict[str, Any]:
    """A stored table. UserError if it is damaged."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        text_of(result)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error!r}): make it again by quality_curve") from None
    return result


def read_run(name: str) -> Run:
    """A run's settings, statistics and images. UserError if it is no run, or not finished."""
    from eval.metrics.pictures import images_in, pair, prompts_of

    folder = Path(name)
    try:
        config = json.loads((folder / "generation_configs.json").read_text(encoding="utf-8"))
        settings = config["determines_images"]
        entries: dict[str, Any] = {}
        for path in sorted(folder.glob("global_statistics_*.json")):
            entries |= json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no run of generate_images, or damaged ({error})") from None
    pairs = pair(images_in(folder, "run"), prompts_of(folder, None, "generate_images"), -1, "images")
    return Run(folder, settings, entries, {pair.name: pair.path for pair in pairs})


def check(base: Run, others: Sequence[Run], arms: Sequence[Run]) -> None:
    """UserError unless the runs share law and prompts, and have the seeds that the comparison needs."""
    for other in (*others, *arms):
        for name in LAW:
            if other.settings.get(name) != base.settings.get(name):
                raise UserError(
                    f"{other.folder}: made with {name} = {other.settings.get(name)!r}, {base.folder} with "
                    f"{base.settings.get(name)!r}; make both alike"
                )
        texts = [{name: entry["prompt"] for name, entry in run.entries.items()} for run in (base, other)]
        if texts[0] != texts[1]:
            raise UserError(f"{other.folder} and {base.folder} are not of the same prompts; make both alike")
    for plain in (base, *others):
        if plain.settings.get("tree") is not None or plain.settings.get("static") is not None:
            raise UserError(f"{plain.folder}: not plain decoding; make it with --model_type base")
    seeds = [run.seed for run in (base, *others)]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--base and --others have seeds {', '.join(map(str, seeds))}: all must differ")
    for arm in arms:
        if arm.seed != base.seed:
            raise UserError(f"{arm.folder}: seed {arm.seed}, --base has {base.seed}; give arms of that seed")


def rows_of(
    base: Run, others: Sequence[Run], arms: Sequence[Run], features: Mapping[Path, Tensor]
) -> list[dict[str, Any]]:
    """A row a run: plain decoding, its yardstick, exact arms, relaxed ones by k and delta.

    same_images, same_pixels: shares equal to plain decoding's at the same seed. fd_same_seed: distance to
    those images. fd_other_seeds: mean distance to the sets of the other seeds, which is what to compare with
    the yardstick; kid_other_seeds likewise, unbiased at any number of images, times 1000.
    """
    from eval.metrics.distances import frechet, mmd

    def row(name: str, run: Run, against: Sequence[Run]) -> dict[str, Any]:
        own = features[run.folder]
        far = [features[other.folder] for other in against]
        same = [equal_pixels(run.paths[name], base.paths[name]) for name in base.entries]
        return {
            "arm": name,
            "delta": run.delta,
            "k": run.neighbours,
            "seed": run.seed,
            "tau": run.tau,
            "target_calls": sum(e["target_calls"] for e in run.entries.values()) / len(run.entries),
            "same_images": sum(share == 1 for share in same) / len(same),
            "same_pixels": sum(same) / len(same),
            "fd_same_seed": max(frechet(own, features[base.folder]), 0.0),
            "fd_other_seeds": sum(frechet(own, other) for other in far) / len(far),
            "kid_other_seeds": 1000 * sum(mmd(own, other) for other in far) / len(far),
        }

    rows = [row("ar", base, others)]
    for one, two in combinations((base, *others), 2):
        rows.append(row(f"{YARDSTICK} ({two.seed} to {one.seed})", two, [one]))
    ordered = sorted(arms, key=lambda arm: (arm.neighbours or 0, arm.delta or 0))
    return rows + [row(arm.folder.name, arm, others) for arm in ordered]


def equal_pixels(one: Path, two: Path) -> float:
    """Share of pixels in which two images agree in every channel; 0 for other sizes."""
    import numpy as np

    from eval.metrics.pictures import read_image

    a, b = (np.asarray(read_image(path)) for path in (one, two))
    return float((a == b).all(-1).mean()) if a.shape == b.shape else 0.0


def source(result: Mapping[str, Any]) -> str:
    """What a reader needs to repeat the table."""
    law, dirty = result["law"], ", with uncommitted changes" if result["dirty"] else ""
    return (
        f"`main.py quality_curve`, {result['images']} images an arm, temperature {law['temperature']:g}, "
        f"guidance {law['cfg']:g}, {law['precision']}, EfficientNet-Lite0 {result['weights']['effnet']}, "
        f"{result['device']}, commit {result['commit']}{dirty}, {result['date']}."
    )


def grid(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of the table, headings first."""
    cells = [list(HEADINGS)]
    for row in rows:
        budget = ["", ""] if row["delta"] is None else [f"{row['delta']:g}", str(row["k"])]
        shares = [f"{row['same_images']:.0%}", f"{row['same_pixels']:.1%}"]
        distances = [f"{row[f'fd_{seed}']:.2f}" for seed in ("same_seed", "other_seeds")]
        kid = f"{row['kid_other_seeds']:.1f}"
        cells.append([row["arm"], *budget, f"{row['tau']:.2f}", *shares, *distances, kid])
    return cells


def text_of(result: Mapping[str, Any]) -> str:
    """In Markdown: the table above what a reader needs to repeat it."""
    return f"{markdown.table(grid(result['results']))}\n\n{source(result)}"
