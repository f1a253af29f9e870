"""sweep: constants of the adaptive tree on one grid, interleaved and timed as bench does, best first."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from eval.bench import make_lanes
from eval.measure import measure, summaries, table
from eval.outputs import write_json
from eval.prompts import load_prompts
from eval.session import circumstances, load_model, make_requests
from eval.sweep_options import points


def run(args: argparse.Namespace) -> None:
    """Measure every point, print the best, store all; the last line printed is one JSON document."""
    methods = points(args)
    prompts = load_prompts(args)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(args, need_drafter=True)
    requests, longest = make_requests(model, prompts, args.random_seed)
    lanes = make_lanes(model, methods, args.batch_size, longest)
    measure(lanes, requests, args.batch_size, args.warmup, lanes[0].decoder.target.device)
    constants = {name: asdict(method.adapt) for name, method in methods if method.adapt is not None}
    rows = [{**row, "constants": constants.get(row["arm"])} for row in summaries(lanes)]
    rows.sort(key=lambda row: -row["SR"])
    baselines = [row for row in rows if row["constants"] is None]
    adaptive = [row for row in rows if row["constants"] is not None]
    width = max(len(row["arm"]) for row in rows)
    print(table([*baselines, *adaptive[: args.top]], width))
    result = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **circumstances(model, args),
        "prompts": len(prompts),
        "cfg": args.cfg,
        "options": vars(args),
        "results": rows,
    }
    write_json(folder / "sweep.json", result)
    best = adaptive[0] if adaptive else None
    print(json.dumps({"points": len(rows), "best": best, "stored": str(folder / "sweep.json")}))
