"""reliability: how often drafts are accepted against how often their proposer said so, by source and rank."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adt_tree.calibrate import EDGES
from adt_tree.roles import Request
from eval import arms, figures
from eval.bench import make_lanes
from eval.heard import Record, hear
from eval.measure import Lane
from eval.outputs import write_json
from eval.prompts import HELD_OUT_FILE, load_prompts
from eval.reliability_options import recorded_methods
from eval.session import circumstances, load_model, make_requests

SOURCE_NAMES = ("drafter", "stale", "both", "seed")  # by their numbers in adt_tree.calibrate
# source -> rank -> a point a bin: nodes reached, mean predicted rate, observed rate
Curves = dict[str, dict[int, list[tuple[int, float, float]]]]


def run(args: argparse.Namespace) -> None:
    """Decode under a record, print errors, store counts and picture; the last line is one JSON document."""
    methods = recorded_methods(args)
    prompts = load_prompts(args, HELD_OUT_FILE)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(args, need_drafter=any(method.needs_drafter for _, method in methods))
    requests, longest = make_requests(model, prompts, args.random_seed)
    lanes = make_lanes(model, methods, min(args.batch_size, len(requests)), longest)
    cells = {}
    with tqdm(total=len(lanes) * len(requests), unit="image", disable=None) as bar:
        for lane in lanes:
            bar.set_postfix_str(lane.name)
            cells[lane.name] = cells_of(_record(lane, requests, bar))
    drawn = {name: curves(found) for name, found in cells.items()}
    summary = {name: errors(found) for name, found in drawn.items()}
    figures.reliability(drawn, folder / "reliability.png")
    about = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **circumstances(model, args),
        "prompts": len(prompts),
        "cfg": args.cfg,
        "temperature": args.temperature,
    }
    stored = folder / "reliability.json"
    write_json(stored, {**about, "options": vars(args), "errors": summary, "cells": cells})
    print(table(summary))
    print(json.dumps({**about, "errors": summary, "stored": str(stored)}))


def _record(lane: Lane, requests: Sequence[Request], bar: tqdm) -> Record:
    """Decode the requests under a record."""
    arm = lane.decoder
    static = arms.static_tree(arm.method.static) if arm.method.static else None
    shape = arms.largest(arm.method, static, arm.target.num_codes)
    record = Record(shape.width, shape.depth, arm.target.device)
    heard = replace(arm, proposer=hear(arm.proposer, record))
    for _ in heard.decode(iter(requests)):
        bar.update()
    return record


def cells_of(record: Record) -> list[dict[str, Any]]:
    """Every cell that was reached: where, its nodes reached and accepted, and the mean predicted rate."""
    bounds = (0.0, *EDGES, 1.0)
    found = []
    for place in record.counts[..., 0].nonzero().tolist():
        reached, accepted, said = record.counts[tuple(place)].tolist()
        source, rank, depth, low = place
        found.append(
            {
                "source": SOURCE_NAMES[source],
                "rank": rank,
                "depth": depth + 1,
                "bin": list(bounds[low : low + 2]),
                "reached": int(reached),
                "accepted": int(accepted),
                "predicted": round(said / reached, 5),
            }
        )
    return found


def curves(cells: Iterable[dict[str, Any]]) -> Curves:
    """The cells by source and rank as points, bin by bin, all depths together."""
    sums: dict[tuple[str, int], dict[float, list[float]]] = {}
    for cell in cells:
        bins = sums.setdefault((cell["source"], cell["rank"]), {})
        entry = bins.setdefault(cell["bin"][0], [0, 0.0, 0])
        entry[0] += cell["reached"]
        entry[1] += cell["reached"] * cell["predicted"]
        entry[2] += cell["accepted"]
    found: Curves = {}
    for (source, rank), bins in sorted(sums.items(), key=lambda item: item[0][1]):
        points = [(int(n), said / n, hits / n) for _, (n, said, hits) in sorted(bins.items())]
        found.setdefault(source, {})[rank] = points
    return {source: found.get(source, {}) for source in SOURCE_NAMES}


def errors(drawn: Curves) -> list[dict[str, Any]]:
    """Expected calibration error by source and rank; rank null: all of a source.

    ECE: mean over reached nodes of |mean predicted - observed rate| of their rank and bin.
    """
    rows = []
    for source, ranks in drawn.items():
        for rank in (*ranks, None) if ranks else ():
            points = [point for r in ranks if rank in (r, None) for point in ranks[r]]
            reached = sum(n for n, _, _ in points)
            rows.append(
                {
                    "source": source,
                    "rank": rank,
                    "reached": reached,
                    "predicted": round(sum(n * said for n, said, _ in points) / reached, 4),
                    "observed": round(sum(n * rate for n, _, rate in points) / reached, 4),
                    "ece": round(sum(n * abs(said - rate) for n, said, rate in points) / reached, 4),
                }
            )
    return rows


def table(summary: dict[str, list[dict[str, Any]]]) -> str:
    """Errors for a reader."""
    head = (
        f"{'arm':<14} {'source':<8} {'rank':>4} {'reached':>9} {'predicted':>10} {'observed':>9} {'ECE':>7}"
    )
    lines = [head, "-" * len(head)]
    for name, rows in summary.items():
        for row in rows:
            rank = "all" if row["rank"] is None else row["rank"]
            lines.append(
                f"{name:<14} {row['source']:<8} {rank:>4} {row['reached']:>9} {row['predicted']:>10.3f} "
                f"{row['observed']:>9.3f} {row['ece']:>7.3f}"
            )
    return "\n".join(lines)
