"""acceptance: where images are easy, averaged over those of a run, by cell. No torch unless there are dumps.

Codes a target call, depth and width of its tree, and the target's probability of its likeliest code, the last
from the dumps that `generate_images --dump N` leaves.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import figures
from eval.errors import UserError
from eval.outputs import STEPS, make_folder, read_statistics, read_steps, write_json

Map = list[list[float]]
TOP = "top1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of acceptance."""
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders that generate_images wrote, a row each"
    )
    group.add_argument(
        "--output_dir", default="runs/acceptance", metavar="DIR", help="folder of acceptance.json and .png"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> None:
    """Average, draw, store; the last line printed is one JSON document."""
    rows = [average(Path(name)) for name in args.runs]
    folder = Path(args.output_dir)
    make_folder(folder)
    figures.acceptance([(row["run"], row["maps"]) for row in rows], folder / "acceptance.png")
    write_json(folder / "acceptance.json", {"acceptance": rows})
    for row in rows:
        link = row["correlation"]
        told = "" if link is None else f"; correlation of codes a call with top-1 probability {link:.2f}"
        print(f"{row['run']}: {row['images']} images, {row['codes_a_call']:.2f} codes a target call{told}")
    print(json.dumps({"runs": len(rows), "output_dir": args.output_dir}))


def average(folder: Path) -> dict[str, Any]:
    """A run's maps, each averaged over its images. UserError if its steps are missing or of several grids."""
    names = [name for found in read_statistics(folder) for name in found]
    steps = {name: own for name, own in read_steps(folder / STEPS, names).items() if own}
    if not steps:
        raise UserError(f"{folder}: its {STEPS} has no cycle of its images; run generate_images on it again")
    grids = {grid_of(own) for own in steps.values()}
    if len(grids) > 1:
        raise UserError(f"{folder}: images of several grids ({sorted(grids)}); give runs of one model")
    ((height, width),) = grids
    every = [figures.maps(own, height, width) for own in steps.values()]
    found = {kind: _mean([maps[kind] for maps in every]) for kind in every[0]}
    calls = [step["accepted"] + 1 for own in steps.values() for step in own]
    return {
        "run": folder.name,
        "images": len(steps),
        "grid": [height, width],
        "codes_a_call": sum(calls) / len(calls),
        "correlation": correlation(found["codes a call"], found[TOP]) if TOP in found else None,
        "maps": {kind: [[None if math.isnan(v) else round(v, 4) for v in row] for row in cells]
                 for kind, cells in found.items()},
    }  # fmt: skip


def grid_of(steps: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Rows and columns of an image, from its cycles. UserError if they do not tell."""
    codes = max(step["position"] + step["accepted"] + 1 for step in steps)
    below = next((step for step in steps if step["row"] > 0), None)
    width = codes if below is None else (below["position"] - below["column"]) // below["row"]
    if width < 1 or codes % width:
        raise UserError(f"{STEPS}: {codes} codes in rows of {width}: its cycles are not those of one image")
    return codes // width, width


def _mean(maps: Sequence[Map]) -> Map:
    """The mean of every cell over the maps that have it."""
    rows = []
    for cells in zip(*maps, strict=True):
        columns = [[v for v in values if not math.isnan(v)] for values in zip(*cells, strict=True)]
        rows.append([sum(values) / len(values) if values else math.nan for values in columns])
    return rows


def correlation(one: Map, other: Map) -> float | None:
    """Pearson's, over the cells that both have; None where one of them does not vary."""
    pairs = [
        pair
        for rows in zip(one, other, strict=True)
        for pair in zip(*rows, strict=True)
        if not any(math.isnan(value) for value in pair)
    ]
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    apart = [(a - means[0], b - means[1]) for a, b in pairs]
    spread = math.sqrt(sum(a * a for a, _ in apart) * sum(b * b for _, b in apart))
    return sum(a * b for a, b in apart) / spread if spread > 0 else None
