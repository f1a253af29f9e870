"""sweep: constants of the adaptive tree on one grid, interleaved and timed as bench does, best first."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from eval.bench import time_points
from eval.measure import print_runs, summaries, table
from eval.outputs import write_json
from eval.prompts import load_prompts
from eval.sweep_options import points


def run(args: argparse.Namespace) -> None:
    """Measure every point, print the best, store all; the last line printed is one JSON document."""
    methods = points(args)
    prompts = load_prompts(args)
    lanes, about = time_points(args, "sweep", methods, prompts)
    constants = {name: asdict(method.adapt) for name, method in methods if method.adapt is not None}
    rows = [{**row, "constants": constants.get(row["arm"])} for row in summaries(lanes)]
    rows.sort(key=lambda row: -row["SR"])
    baselines = [row for row in rows if row["constants"] is None]
    adaptive = [row for row in rows if row["constants"] is not None]
    width = max(len(row["arm"]) for row in rows)
    print(table([*baselines, *adaptive[: args.top]], width))
    print_runs(about["runs"])
    stored = Path(args.output_dir) / "sweep.json"
    write_json(stored, {**about, "results": rows})
    best = adaptive[0] if adaptive else None
    print(json.dumps({"points": len(rows), "best": best, "runs": about["runs"], "stored": str(stored)}))
