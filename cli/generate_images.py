"""generate_images: prompts -> images, statistics, maps. Stops and goes on without losing a finished image.

Started by a launcher (accelerate launch, torchrun), process r of n takes every n-th prompt; every image is
what a single process makes of it, as its seed is its prompt's. Whoever ends last tells of all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.method import Method
from adt_tree.policy import AdaptiveTree, TreeShape
from cli.method import DecodingOptions, method_from
from cli.options import PromptOptions, RunOptions
from cli.parser import declare, option
from eval.runs.prompts import DEFAULT_END, Prompt, held_out_texts, load_prompts

if TYPE_CHECKING:
    from adt_tree.engine import Engine
    from adt_tree.pipeline import Pipeline
    from adt_tree.roles import Request
    from eval.runs.run_folder import RunFolder
    from models.model import Model


@declare
class Options(DecodingOptions, PromptOptions, RunOptions):
    """maps"""

    heatmaps: int = option("first images drawn beside maps of their trees", 4, unit="N", least=0)
    record: int = option(
        "first images decoded again, alone, all steps kept for report's races", 0, unit="N", least=0
    )


def run(options: Options) -> None:
    """Do what the command line says; the last line printed is one JSON document."""
    method, prompts = method_from(options), load_prompts(options)
    from cli.loading import load, settled
    from eval.runs.run_folder import RunFolder
    from eval.runs.session import make_requests, worker

    rank, count = worker()
    pipe = load(options, method.spec.network)
    window = (options.start_idx, options.end_idx or DEFAULT_END)
    facts = fingerprint(options, method, pipe.model)
    folder = RunFolder(Path(options.output_dir), window, prompts, facts)
    pending = [prompt for prompt in prompts[rank::count] if not folder.done(prompt.name)]
    skipped = sum(folder.done(prompt.name) for prompt in prompts)
    requests, engine = [], None
    if pending:
        requests = make_requests(pipe, pending, options.random_seed)
        engine = pipe.engine(method, requests, options.batch_size)
    folder.start(settled(options, pipe.model))  # nothing is refused from here on
    made, started = 0, time.perf_counter()
    try:
        made = decode(pipe, engine, folder, requests, rank > 0) if engine else 0
    finally:
        completed = folder.merge()
    wall = time.perf_counter() - started
    if count > 1 and pending:
        print(f"process {rank} of {count}: {made} images")
    if not (count == 1 or completed or (rank == 0 and not pending)):
        return  # another process tells of all
    draw(options, method, pipe, folder, prompts)
    record(options, method, pipe, folder, prompts)
    summary = summarise(folder.finished(), skipped, wall)
    print(table(summary))
    aligned = pipe.model.aligned
    print(json.dumps({**summary, "drafter_alignment": aligned, "output_dir": options.output_dir}))


def fingerprint(options: Options, method: Method, model: Model) -> dict[str, Any]:
    """Everything that changes an image or its record: what a folder's runs must share."""
    sampling, tree = method.sampling, method.tree
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "cfg": sampling.guidance,
        "static": tree if isinstance(tree, str) else None,
        "tree": asdict(tree) if isinstance(tree, TreeShape) else None,
        "adt": asdict(tree) if isinstance(tree, AdaptiveTree) else None,
        "lantern": asdict(method.lantern) if method.lantern else None,
        "verify": method.verify,
        "rules": method.rules,
        "control": method.control,
        "drafter": method.spec.drafter,
        "seed_cells": method.seeds or "above",
        "model": options.model,
        "weights": model.weights_sha,
        "drafter_weights": model.drafter_sha,
        **({"drafter_alignment": model.token_shift} if model.token_shift != "published" else {}),
        "precision": model.precision,
        "device": model.device.type,
        "random_seed": options.random_seed,
    }


def decode(
    pipe: Pipeline, engine: Engine, folder: RunFolder, requests: Sequence[Request], silent: bool
) -> int:
    """Decode what nobody has finished and keep each image as it finishes; the number of images."""
    from tqdm import tqdm

    from eval.runs.session import synchronise

    codes = calls = number = 0
    left = (request for request in requests if not folder.done(request.name))
    with tqdm(total=len(requests), unit="image", disable=silent, smoothing=0.1) as bar:
        started = time.perf_counter()
        for number, decoded in enumerate(engine.decode(left), start=1):
            clock = time.perf_counter()
            image = pipe.image(decoded.codes)
            synchronise(engine.target.device)
            folder.add(decoded, image, time.perf_counter() - clock)
            codes += sum(step.accepted + 1 for step in decoded.steps)
            calls += decoded.target_calls
            rate = number / (time.perf_counter() - started)
            bar.set_postfix_str(f"tau {codes / max(calls, 1):.2f}, {rate:.2f} images/s", refresh=False)
            bar.update()
    return number


def draw(
    options: Options, method: Method, pipe: Pipeline, folder: RunFolder, prompts: Sequence[Prompt]
) -> None:
    """The contact sheet, and the maps of the first images where there are trees to map."""
    from eval import figures
    from eval.runs.run_folder import read_steps

    pictures = [(folder.png(prompt.name), prompt.text) for prompt in prompts]
    figures.contact_sheet(pictures, held_out_texts(), folder.root / "contact_sheet.png")
    if not method.drafting:
        return
    first, grid = prompts[: options.heatmaps], pipe.model.grid
    steps = read_steps(folder.steps_path, (prompt.name for prompt in first))
    for prompt in first:
        path = folder.root / f"heatmap_{folder.files[prompt.name]}.png"
        own = steps[prompt.name]
        figures.heatmap(folder.png(prompt.name), prompt.text, own, (grid.height, grid.width), path)


def record(
    options: Options, method: Method, pipe: Pipeline, folder: RunFolder, prompts: Sequence[Prompt]
) -> None:
    """Recordings of the first images, where an earlier run has left none."""
    from eval import race

    finished = folder.finished()
    for prompt in prompts[: options.record]:
        path = folder.root / f"{race.PREFIX}{folder.files[prompt.name]}.json"
        if not path.exists():
            race.write(path, race.record(pipe, method, prompt.text, finished[prompt.name]["seed"]))


def summarise(entries: dict[str, dict[str, Any]], skipped: int, wall: float) -> dict[str, Any]:
    """Means over images; tau over target calls."""
    from eval.runs.run_folder import tau_of

    count = len(entries)
    made = count - skipped

    def mean(key: str, digits: int) -> float:
        return round(sum(entry[key] for entry in entries.values()) / count, digits)

    return {
        "images": count, "skipped": skipped, "tau": round(tau_of(entries.values()), 4),
        "target_calls": mean("target_calls", 2), "drafter_calls": mean("drafter_calls", 2),
        "mean_depth": mean("mean_depth", 3), "mean_nodes": mean("mean_nodes", 3),
        "latency_s": mean("latency", 4), "wall_s": round(wall, 3),
        "images_per_s": round(made / wall, 4) if made else None,
    }  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    rows = [
        ("images", f"{summary['images']} ({summary['skipped']} of them from an earlier run)"),
        ("tau, codes per target call", f"{summary['tau']:.2f}"),
        ("target calls per image", f"{summary['target_calls']:.1f}"),
        ("drafter calls per image", f"{summary['drafter_calls']:.1f}"),
        ("mean depth, nodes of a tree", f"{summary['mean_depth']:.2f}, {summary['mean_nodes']:.1f}"),
        ("seconds per image", f"{summary['latency_s']:.3f}"),
    ]
    if summary["images_per_s"] is not None:
        rows.append(("images per second", f"{summary['images_per_s']:.2f}"))
    return "\n".join(f"  {label:<28} {value}" for label, value in rows)
