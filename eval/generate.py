"""generate_images: prompts -> images, statistics, maps. Stops and goes on without losing a finished image.

Started several times at once on one folder (accelerate launch, torchrun, or by hand on many machines), the
processes share the prompts; every image is what a single process makes of it, as its seed is its prompt's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adt_tree.records import Decoded
from adt_tree.roles import Request
from eval import arms, figures
from eval.claims import Worker, worker
from eval.errors import UserError
from eval.method import Method, method_from
from eval.options import DEFAULT_END
from eval.outputs import RunFolder, read_steps, tau_of
from eval.prompts import Prompt, held_out_texts, load_prompts
from eval.session import load_model, make_requests, synchronise
from models.model import Model

POLL_S = 0.5  # between looks at images that other processes have in hand
GATHER_S = 10.0  # at least, between updates of the statistics while images are made
GATHER_SHARE = 0.05  # at most, of the time goes to them


def run(args: argparse.Namespace) -> None:
    """Do what the command line says; the last line printed is one JSON document."""
    method = method_from(args)
    prompts = load_prompts(args)
    window = (args.start_idx, args.end_idx or DEFAULT_END)
    folder = RunFolder(Path(args.output_dir), window, prompts)
    own = worker()
    model = load_model(args, need_drafter=method.needs_drafter)
    folder.open(determining(args, method, model), vars(args))
    pending = [prompt for prompt in prompts if prompt.name not in folder.statistics]
    skipped, started = len(prompts) - len(pending), time.perf_counter()
    speaks = own.count == 1 or (own.leads and not pending)
    if pending:
        try:
            made = _decode(args, method, model, folder, pending, own)
        finally:
            merged = folder.merge()
        if own.count > 1:
            print(f"process {own.rank} of {own.count}: {made} images")
        speaks = speaks or merged
    wall = time.perf_counter() - started
    if not speaks:  # another process merged the statistics, and tells of all
        return
    _draw(args, method, model, folder, prompts)
    summary = summarise(folder.finished(), skipped, wall)
    print(table(summary))
    print(json.dumps({**summary, "drafter_alignment": model.aligned, "output_dir": args.output_dir}))


def determining(args: argparse.Namespace, method: Method, model: Model) -> dict[str, Any]:
    """Everything that changes an image or its record, flat: what a folder's runs must share."""
    flat = {key: value for key, value in asdict(method).items() if not isinstance(value, dict)}
    for name, part in (("tree", method.shape), ("adt", method.adapt), ("lantern", method.lantern)):
        flat[name] = None if part is None else asdict(part)
    for name in ("shape", "adapt"):
        flat.pop(name, None)
    return {
        **flat,
        "model": args.model,
        "weights": model.weights_sha,
        "drafter_weights": model.drafter_sha,
        **({"drafter_alignment": model.pairing} if model.pairing != "published" else {}),
        "precision": args.precision,
        "device": args.device,
        "random_seed": args.random_seed,
    }


def _decode(
    args: argparse.Namespace,
    method: Method,
    model: Model,
    folder: RunFolder,
    prompts: Sequence[Prompt],
    own: Worker,
) -> int:
    """Decode the prompts, but for those that other processes make, and keep each image as it finishes.

    Returns once all prompts are finished, by whomever; the number of images made here.
    """
    try:
        requests, longest = make_requests(model, prompts, args.random_seed)
        arm = arms.build(model, method, min(args.batch_size, len(requests)), longest)
    except ValueError as error:
        raise UserError(str(error)) from error
    codes = calls = number = 0
    quiet = None if own.leads else True
    with tqdm(total=len(requests), unit="image", disable=quiet, smoothing=0.1) as bar:
        started = due = time.perf_counter()
        for number, decoded in enumerate(_until_done(arm, requests, folder), start=1):
            clock = time.perf_counter()
            image = model.image(decoded.codes)
            synchronise(arm.target.device)
            folder.add(decoded, image, time.perf_counter() - clock)
            if own.leads and time.perf_counter() >= due:
                clock = time.perf_counter()
                folder.gather()
                due = time.perf_counter()
                due += max(GATHER_S, (due - clock) / GATHER_SHARE)
            codes += sum(step.accepted + 1 for step in decoded.steps)
            calls += decoded.target_calls
            rate = number / (time.perf_counter() - started)
            bar.set_postfix_str(f"tau {codes / max(calls, 1):.2f}, {rate:.2f} images/s", refresh=False)
            bar.update()
    return number


def _until_done(
    arm: arms.Arm, requests: Sequence[Request], folder: RunFolder
) -> Iterator[Decoded]:
    """Images as they finish; what other processes have in hand is waited for, and made if they stop."""
    while True:
        yield from arm.decode(_taken(requests, folder))
        requests = [request for request in requests if not folder.done(request.name)]
        if not requests:
            return
        time.sleep(POLL_S)


def _taken(requests: Sequence[Request], folder: RunFolder) -> Iterator[Request]:
    """Requests that nobody makes, claimed as a slot asks for the next: slow processes take fewer."""
    return (request for request in requests if folder.take(request.name))


def _draw(
    args: argparse.Namespace, method: Method, model: Model, folder: RunFolder, prompts: Sequence[Prompt]
) -> None:
    """The contact sheet, and the maps of the first images where there are trees to map."""
    figures.contact_sheet(
        [(folder.png(prompt.name), prompt.text) for prompt in prompts],
        held_out_texts(),
        folder.root / "contact_sheet.png",
    )
    if not method.drafting:
        return
    first = prompts[: args.heatmaps]
    steps = read_steps(folder.steps_path, (prompt.name for prompt in first))
    for prompt in first:
        path = folder.root / f"heatmap_{folder.files[prompt.name]}.png"
        figures.heatmap(
            folder.png(prompt.name),
            prompt.text,
            steps[prompt.name],
            (model.grid.height, model.grid.width),
            path,
        )


def summarise(entries: dict[str, dict[str, Any]], skipped: int, wall: float) -> dict[str, Any]:
    """Means over images; tau over target calls."""
    count = len(entries)

    def mean(key: str) -> float:
        return sum(entry[key] for entry in entries.values()) / count

    made = count - skipped
    return {
        "images": count, "skipped": skipped, "tau": round(tau_of(entries.values()), 4),
        "target_calls": round(mean("target_calls"), 2),
        "drafter_calls": round(mean("drafter_calls"), 2), "mean_depth": round(mean("mean_depth"), 3),
        "mean_nodes": round(mean("mean_nodes"), 3), "latency_s": round(mean("latency"), 4),
        "wall_s": round(wall, 3), "images_per_s": round(made / wall, 4) if made else None,
    }  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    rows = [
        ("images", f"{summary['images']} ({summary['skipped']} of them from an earlier run)"),
        ("tau, codes a target call", f"{summary['tau']:.2f}"),
        ("target calls an image", f"{summary['target_calls']:.1f}"),
        ("drafter calls an image", f"{summary['drafter_calls']:.1f}"),
        ("mean depth, nodes of a tree", f"{summary['mean_depth']:.2f}, {summary['mean_nodes']:.1f}"),
        ("seconds an image", f"{summary['latency_s']:.3f}"),
    ]
    if summary["images_per_s"] is not None:
        rows.append(("images a second", f"{summary['images_per_s']:.2f}"))
    return "\n".join(f"  {label:<28} {value}" for label, value in rows)
