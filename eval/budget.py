"""budget: tau and speed-up of every drafter as functions of the nodes drafted, timed as bench does."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from eval import figures
from eval.bench import time_points
from eval.budget_options import lanes_of
from eval.measure import print_runs, summaries, table
from eval.outputs import write_json
from eval.prompts import HELD_OUT_FILE, load_prompts


def run(args: argparse.Namespace) -> None:
    """Measure every point, print the table, draw the curves; the last line printed is one JSON document."""
    methods = lanes_of(args)
    prompts = load_prompts(args, HELD_OUT_FILE)
    folder = Path(args.output_dir)
    lanes, about = time_points(args, "budget", methods, prompts)
    rows = [
        {**row, "drafter": method.drafter, "shape": asdict(method.shape)} if method.shape else row
        for row, (_, method) in zip(summaries(lanes), methods, strict=True)
    ]
    result = {**about, "results": rows}
    figures.budget([row for row in rows if "shape" in row], folder / "budget.png")
    print(table(rows, max(len(row["arm"]) for row in rows)))
    print_runs(about["runs"])
    write_json(folder / "budget.json", result)
    print(json.dumps(result))
