"""throughput: images a minute by images in flight, plain and self-drafted; slots are refilled all along."""

from __future__ import annotations

import argparse
import heapq
import json
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adt_tree.cost import CostTable, best
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval import figures
from eval.bench import make_lanes
from eval.costs import cost_table, offers_of, sized
from eval.measure import Lane, keep, measure
from eval.measurements import Measurements
from eval.method import Method
from eval.options import AUTO
from eval.outputs import write_json
from eval.prompts import MANY_FILE, Prompt, load_prompts
from eval.session import circumstances, load_model, make_requests
from eval.throughput_options import methods_of
from models.model import Model


@dataclass(frozen=True, slots=True)
class Traffic:
    """How the slots were used."""

    passes: int  # of the target, all images sharing each
    occupancy: float  # mean share of the slots that held an image
    tail: float  # share of the passes after the first slot that nobody was left to take


def traffic(calls: Sequence[int], slots: int) -> Traffic:
    """Of images that take so many passes each, in the order they were asked for: the next one takes the slot
    that is free first."""
    ends = [0] * slots
    for own in calls:
        heapq.heappush(ends, heapq.heappop(ends) + own)
    passes = max(ends)
    return Traffic(passes, sum(calls) / (slots * passes), (passes - min(ends)) / passes)


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, draw the curves; the last line printed is one JSON document."""
    methods = methods_of(args)
    prompts = load_prompts(args, MANY_FILE)
    folder = Path(args.output_dir)
    model = load_model(args, need_drafter=False)
    requests, longest = make_requests(model, prompts, args.random_seed)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.cfg)
    rows: list[dict[str, Any]] = []
    tables, runs = [], Counter[str]()
    for slots in args.batch_sizes:
        table = cost_table(args, model, sampling, requests[0].prompt, slots)
        lanes = make_lanes(model, _sized(args, model, methods, table), slots, longest)
        store = _keep(args, model, prompts, lanes, slots)
        measure(lanes, requests, len(requests), args.warmup, lanes[0].decoder.target.device, store)
        rows += _rows(lanes, requests, table, rows)
        tables.append(table.as_dict())
        runs += Counter({part["started"]: part["measurements"] for part in store.runs()})
    result = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **circumstances(model, args),
        "runs": [{"started": when, "measurements": runs[when]} for when in sorted(runs)],
        "prompts": len(prompts),
        "cfg": args.cfg,
        "temperature": args.temperature,
        "options": vars(args),
        "results": [{name: row[name] for name in row if name != "codes"} for row in rows],
        "costs": tables,
    }
    figures.throughput(rows, folder / "throughput.png")
    print(table_of(rows))
    write_json(folder / "throughput.json", result)
    print(json.dumps(result))


def _sized(
    args: argparse.Namespace, model: Model, methods: Sequence[tuple[str, Method]], table: CostTable
) -> list[tuple[str, Method]]:
    """The methods with the size that the costs choose."""
    return [
        (name, sized(method, best(offers_of(args, model, table)).nodes) if name == AUTO else method)
        for name, method in methods
    ]


def _keep(
    args: argparse.Namespace, model: Model, prompts: Sequence[Prompt], lanes: Sequence[Lane], slots: int
) -> Measurements:
    """The measurements of one batch size, in a folder of their own."""
    place = argparse.Namespace(**{**vars(args), "output_dir": str(Path(args.output_dir) / f"batch_{slots}")})
    facts = {**circumstances(model, args), "nodes": [_nodes(lane) for lane in lanes]}
    return keep(place, "throughput", facts, prompts, lanes)


def _nodes(lane: Lane) -> int:
    shape = lane.decoder.method.shape
    return 0 if shape is None else shape.budget


def _rows(
    lanes: Sequence[Lane], requests: Sequence[Request], table: CostTable, before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row a lane. before: those of earlier batch sizes, plain decoding first of all."""
    rows: list[dict[str, Any]] = []
    for lane in lanes:
        made = {image.name: image for image in lane.images}
        images = [made[request.name] for request in requests]
        codes = [image.codes for image in images]
        reference = [*before, *rows, {"codes": codes}][0]["codes"]
        use = traffic([image.target_calls for image in images], table.images)
        (seconds,) = lane.seconds
        steps = [step for image in images for step in image.steps]
        cost = [table.cycle(_nodes(lane), step.position) for step in steps]
        rows.append({
            "arm": lane.name, "batch_size": table.images, "nodes": _nodes(lane),
            "images_per_min": round(60 / seconds, 2),
            "SR": round((rows[0]["seconds"] if rows else seconds) / seconds, 3),
            "seconds": seconds, "tau": round(statistics.mean(step.accepted + 1 for step in steps), 3),
            "cycle_ms": round(statistics.median(step.ms for step in steps), 3),
            "predicted_ms": round(statistics.mean(cost), 3),
            "passes": use.passes, "occupancy": round(use.occupancy, 4), "tail": round(use.tail, 4),
            "same_image": sum(a == b for a, b in zip(codes, reference, strict=True)) / len(codes),
            "codes": codes,
        })  # fmt: skip
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Rows for a reader. cycle, by costs: milliseconds measured, and as the cost table has them."""
    head = (
        f"{'images in flight':<17} {'arm':<7} {'nodes':>5} {'images/min':>10} {'SR':>5} {'tau':>5} "
        f"{'cycle':>7} {'by costs':>8} {'slots full':>10} {'tail':>5} {'= AR':>5}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        lines.append(
            f"{row['batch_size']:<17} {row['arm']:<7} {row['nodes']:>5} {row['images_per_min']:>10.1f} "
            f"{row['SR']:>5.2f} {row['tau']:>5.2f} {row['cycle_ms']:>7.1f} {row['predicted_ms']:>8.1f} "
            f"{row['occupancy']:>10.1%} {row['tail']:>5.0%} {row['same_image']:>5.0%}"
        )
    return "\n".join(lines)
