"""sweep: constants of the adaptive tree on one grid, interleaved and timed as bench does, best first."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from eval.bench import make_lanes
from eval.measure import keep, measure, print_runs, summaries, table
from eval.outputs import write_json
from eval.prompts import load_prompts
from eval.session import circumstances, load_model, make_requests
from eval.sweep_options import points


def run(args: argparse.Namespace) -> None:
    """Measure every point, print the best, store all; the last line printed is one JSON document."""
    methods = points(args)
    prompts = load_prompts(args)
    folder = Path(args.output_dir)
    model = load_model(args, need_drafter=any(method.needs_drafter for _, method in methods))
    requests, longest = make_requests(model, prompts, args.random_seed)
    lanes = make_lanes(model, methods, args.batch_size, longest)
    facts = circumstances(model, args)
    store = keep(args, "sweep", facts, prompts, lanes)
    measure(lanes, requests, args.batch_size, args.warmup, lanes[0].decoder.target.device, store)
    constants = {name: asdict(method.adapt) for name, method in methods if method.adapt is not None}
    rows = [{**row, "constants": constants.get(row["arm"])} for row in summaries(lanes)]
    rows.sort(key=lambda row: -row["SR"])
    baselines = [row for row in rows if row["constants"] is None]
    adaptive = [row for row in rows if row["constants"] is not None]
    width = max(len(row["arm"]) for row in rows)
    print(table([*baselines, *adaptive[: args.top]], width))
    print_runs(store.runs())
    result = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **facts,
        "runs": store.runs(),
        "prompts": len(prompts),
        "cfg": args.cfg,
        "options": vars(args),
        "results": rows,
    }
    write_json(folder / "sweep.json", result)
    best = adaptive[0] if adaptive else None
    stored = str(folder / "sweep.json")
    print(json.dumps({"points": len(rows), "best": best, "runs": store.runs(), "stored": stored}))
