"""bench: every arm on the same prompts and seeds in one run, against plain decoding and transformers."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval import arms
from eval.bench_options import ARMS, arm_methods, check_reference
from eval.controls import roofline
from eval.errors import UserError
from eval.measure import Lane, keep, measure, print_runs, summaries, table, warm_up
from eval.method import Method
from eval.outputs import write_json
from eval.profiling import PARTS, profile
from eval.prompts import HELD_OUT_FILE, Prompt, load_prompts
from eval.session import circumstances, load_model, make_requests, synchronise
from models.checkpoint.hub import locate
from models.model import Model
from models.registry import SPECS

PROFILED = 4  # images
LABEL = 1 + max(map(len, ARMS))  # columns of an arm's name


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, store the results; the last line printed is one JSON document."""
    check_reference(args)
    methods = arm_methods(args)
    prompts = load_prompts(args, HELD_OUT_FILE)
    folder = Path(args.output_dir)
    model = load_model(args, need_drafter=any(method.needs_drafter for _, method in methods))
    clock = time.perf_counter()
    requests, longest = make_requests(model, prompts, args.random_seed)
    encode_s = (time.perf_counter() - clock) / len(requests)
    lanes = make_lanes(model, methods, args.batch_size, longest)
    ours = [lane.decoder for lane in lanes]
    if args.reference:
        lanes += _reference_lanes(args, model, lanes, longest)
    facts = circumstances(model, args)
    store = keep(args, "bench", facts, prompts, lanes)
    measure(lanes, requests, args.batch_size, args.warmup, ours[0].target.device, store)
    result: dict[str, Any] = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **facts,
        "runs": store.runs(),
        "prompts": len(prompts),
        "batch_size": args.batch_size,
        "cfg": args.cfg,
        "text_encode_s": round(encode_s, 6),
        "vq_decode_s": round(_vq_seconds(model, lanes[0]), 5),
        "roofline": roofline(model),
        "options": vars(args),
        "results": summaries(lanes),
    }
    print(table(result["results"], LABEL))
    bound = result["roofline"]
    print(
        f"\nReading the target's {bound['weights_mb']:.1f} MB once at the copy bandwidth of "
        f"{bound['copy_gb_per_s']:.1f} GB/s: {bound['read_ms']:.2f} ms."
    )
    print(
        f"\nSR: seconds of plain decoding (ar) / seconds, median of {len(prompts)} prompts. "
        f"VQ decoding, not counted: {result['vq_decode_s']:.4f} s an image."
    )
    print_runs(result["runs"])
    if args.profile:
        cold = 0 if store.added else args.warmup
        result["profile"] = _profiles(lanes, requests[:PROFILED], cold)
        print(_split_table(result["profile"], "share of time", PARTS, ".1%"))
    write_json(folder / "bench.json", result)
    print(json.dumps(result))


def time_points(
    args: argparse.Namespace, command: str, methods: Sequence[tuple[str, Method]], prompts: Sequence[Prompt]
) -> tuple[list[Lane], dict[str, Any]]:
    """Measure methods that need a lane each and no more: filled lanes, and what their document opens with.

    Interrupted, the same command goes on from --output_dir (see keep).
    """
    model = load_model(args, need_drafter=any(method.needs_drafter for _, method in methods))
    requests, longest = make_requests(model, prompts, args.random_seed)
    lanes = make_lanes(model, methods, args.batch_size, longest)
    facts = circumstances(model, args)
    store = keep(args, command, facts, prompts, lanes)
    measure(lanes, requests, args.batch_size, args.warmup, lanes[0].decoder.target.device, store)
    return lanes, {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **facts,
        "runs": store.runs(),
        "prompts": len(prompts),
        "cfg": args.cfg,
        "options": vars(args),
    }


def make_lanes(model: Model, methods: Sequence[tuple[str, Method]], slots: int, longest: int) -> list[Lane]:
    """A lane a method. UserError for what the model cannot do."""
    try:
        return [
            Lane(name, method.temperature, arms.build(model, method, slots, longest), method.exact)
            for name, method in methods
        ]
    except ValueError as error:
        raise UserError(str(error)) from error


def _reference_lanes(
    args: argparse.Namespace, model: Model, lanes: Sequence[Lane], longest: int
) -> list[Lane]:
    """transformers' plain decoding at every temperature."""
    from eval.baseline import (
        TransformersDecoder,
        load_net,
    )  # seconds of import that other runs need not wait for

    folder = locate(args.model_path, args.revision) if args.model_path else SPECS[args.model].target_folder
    net = load_net(folder, args.precision, lanes[0].decoder.target.device)
    plain = [lane for lane in lanes if lane.name == "ar"]
    laws = [Sampling(lane.temperature, args.top_k, args.top_p, args.cfg) for lane in plain]
    return [
        Lane("transformers", law.temperature, TransformersDecoder(net, model, law, longest), True)
        for law in laws
    ]


def _vq_seconds(model: Model, lane: Lane) -> float:
    """Median seconds of turning one image's codes into pixels."""
    seconds = []
    for image in lane.images:
        started = time.perf_counter()
        model.image(image.codes)
        synchronise(lane.decoder.target.device)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def _profiles(lanes: Sequence[Lane], requests: Sequence[Request], warmup: int) -> list[dict[str, Any]]:
    """The split of time of every arm of ours, after `warmup` images of each."""
    ours = [lane for lane in lanes if isinstance(lane.decoder, arms.Arm)]
    for lane in ours if warmup else ():
        warm_up(lane, requests[0], warmup)
    return [
        {"arm": lane.name, "temperature": lane.temperature, **profile(lane.decoder, requests)}
        for lane in ours
    ]


def _split_table(rows: Sequence[dict[str, Any]], title: str, parts: Sequence[str], style: str) -> str:
    lines = ["", f"{title:<{LABEL}} {'T':>4} " + " ".join(f"{part:>8}" for part in parts)]
    for row in rows:
        lines.append(
            f"{row['arm']:<{LABEL}} {row['temperature']:>4g} "
            + " ".join(f"{row[part]:>8{style}}" for part in parts)
        )
    return "\n".join(lines)
