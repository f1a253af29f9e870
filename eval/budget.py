"""budget: tau and speed-up of every drafter as functions of the nodes drafted, timed as bench does."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from eval import figures
from eval.bench import make_lanes
from eval.budget_options import lanes_of
from eval.measure import keep, measure, print_runs, summaries, table
from eval.outputs import write_json
from eval.prompts import HELD_OUT_FILE, load_prompts
from eval.session import circumstances, load_model, make_requests


def run(args: argparse.Namespace) -> None:
    """Measure every point, print the table, draw the curves; the last line printed is one JSON document."""
    methods = lanes_of(args)
    prompts = load_prompts(args, HELD_OUT_FILE)
    folder = Path(args.output_dir)
    model = load_model(args, need_drafter=any(method.needs_drafter for _, method in methods))
    requests, longest = make_requests(model, prompts, args.random_seed)
    lanes = make_lanes(model, methods, args.batch_size, longest)
    facts = circumstances(model, args)
    store = keep(args, "budget", facts, prompts, lanes)
    measure(lanes, requests, args.batch_size, args.warmup, lanes[0].decoder.target.device, store)
    rows = [
        {**row, "drafter": method.drafter, "shape": asdict(method.shape)} if method.shape else row
        for row, (_, method) in zip(summaries(lanes), methods, strict=True)
    ]
    result = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **facts,
        "runs": store.runs(),
        "prompts": len(prompts),
        "cfg": args.cfg,
        "options": vars(args),
        "results": rows,
    }
    figures.budget([row for row in rows if "shape" in row], folder / "budget.png")
    print(table(rows, max(len(row["arm"]) for row in rows)))
    print_runs(store.runs())
    write_json(folder / "budget.json", result)
    print(json.dumps(result))
