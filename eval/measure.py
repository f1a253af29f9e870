"""Timing ways of decoding fairly: interleaved by prompt in one process, warmed up, clock synchronised."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from adt_tree.records import Decoded
from adt_tree.roles import Request
from eval.measurements import FREE, Key, Measured, Measurements
from eval.prompts import Prompt
from eval.session import synchronise

RESAMPLES = 10_000


class Decodes(Protocol):
    """Anything that turns requests into images."""

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Finished images."""


@dataclass(slots=True)
class Lane:
    """One way of decoding, and what it was measured to do."""

    name: str
    temperature: float
    decoder: Decodes
    exact: bool  # plain decoding's image at the same seed is expected
    seconds: list[float] = field(default_factory=list)  # an image; one entry a batch of prompts
    images: list[Decoded] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """What tells it from the other lanes."""
        return self.name, self.temperature

    def take(self, measured: Measured) -> None:
        """Count a batch of prompts."""
        self.seconds.append(measured.seconds)
        self.images += measured.images


def keep(
    args: argparse.Namespace,
    command: str,
    facts: Mapping[str, Any],
    prompts: Sequence[Prompt],
    lanes: Sequence[Lane],
) -> Measurements:
    """The measurements in --output_dir, tied to all they depend on. UserError if the folder's are of others.

    facts: the run's circumstances.
    """
    texts = json.dumps([(prompt.name, prompt.text) for prompt in prompts])
    determines = {
        **{name: value for name, value in vars(args).items() if name not in FREE},
        **{name: value for name, value in facts.items() if name not in ("date", "dirty")},
        "command": command,
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
    }
    store = Measurements(Path(args.output_dir), [lane.key for lane in lanes], facts["date"])
    store.open(determines, vars(args))
    return store


def measure(
    lanes: Sequence[Lane],
    requests: Sequence[Request],
    batch: int,
    warmup: int,
    device: torch.device,
    store: Measurements,
) -> None:
    """Fill the lanes: a batch of prompts goes through every lane before the next; who is first rotates.

    What the store has is taken from it, and what is measured goes there at once.
    """
    chunks = [requests[start : start + batch] for start in range(0, len(requests), batch)]
    known = [store.finished(_names(chunk)) for chunk in chunks]
    pending = known.count(None)
    warmup = warmup if pending else 0
    with tqdm(total=len(lanes) * (pending + (warmup > 0)), unit="run", disable=None) as bar:
        for lane in lanes if warmup else ():
            bar.set_postfix_str(f"warming up {lane.name} at T = {lane.temperature:g}")
            warm_up(lane, requests[0], warmup)
            bar.update()
        for number, (chunk, before) in enumerate(zip(chunks, known, strict=True)):
            turn = number % len(lanes)
            for lane in (*lanes[turn:], *lanes[:turn]):
                if before is not None:
                    lane.take(before[lane.key])
                    continue
                bar.set_postfix_str(f"{lane.name} at T = {lane.temperature:g}")
                measured = _timed(lane, chunk, device)
                store.add(_names(chunk), lane.key, measured)
                lane.take(measured)
                bar.update()


def warm_up(lane: Lane, request: Request, images: int) -> None:
    """Decode outside the clock: the request's prompt under another seed."""
    list(lane.decoder.decode(iter([Request("warm-up", request.prompt, request.seed + 1)] * images)))


def _names(requests: Sequence[Request]) -> list[str]:
    return [request.name for request in requests]


def _timed(lane: Lane, requests: Sequence[Request], device: torch.device) -> Measured:
    """Decode a batch of prompts by the clock."""
    synchronise(device)
    started = time.perf_counter()
    made = list(lane.decoder.decode(iter(requests)))
    synchronise(device)
    seconds = (time.perf_counter() - started) / len(requests)
    return Measured(seconds, sorted(made, key=lambda image: image.name))


def interval(ratios: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median over prompts."""
    picks = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
    return float(low), float(high)


def summarise(lane: Lane, plain: Lane) -> dict[str, Any]:
    """One row: SR is the median over prompts of plain decoding's seconds / this lane's, in the same run."""
    ratios = np.array(plain.seconds) / np.array(lane.seconds)
    low, high = interval(ratios)
    count, calls = len(lane.images), sum(image.target_calls for image in lane.images)
    expected = {image.name: image.codes for image in plain.images}
    return {
        "arm": lane.name,
        "temperature": lane.temperature,
        "SR": round(float(np.median(ratios)), 3),
        "SR_95": [round(low, 3), round(high, 3)],
        "tau": round(
            sum(step.accepted + 1 for image in lane.images for step in image.steps) / max(calls, 1), 3
        ),
        "mean_depth": round(sum(image.mean_depth for image in lane.images) / count, 3),
        "mean_nodes": round(sum(image.mean_nodes for image in lane.images) / count, 2),
        "target_calls": round(calls / count, 2),
        "drafter_calls": round(sum(image.drafter_calls for image in lane.images) / count, 2),
        "median_s": round(float(np.median(lane.seconds)), 4),
        "images": count,
        "exact": lane.exact,
        "same_image": round(sum(image.codes == expected[image.name] for image in lane.images) / count, 3),
    }


def summaries(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """A row a lane, each against plain decoding at its own temperature."""
    plain = {lane.temperature: lane for lane in lanes if lane.name == "ar"}
    return [summarise(lane, plain[lane.temperature]) for lane in lanes]


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Tell a reader where the measurements come from, if from several runs."""
    if len(runs) > 1:
        parts = ", ".join(f"{run['measurements']} ({run['started']})" for run in runs)
        print(f"\nAssembled from {len(runs)} runs; measurements of each: {parts}.")


def table(rows: Sequence[dict[str, Any]], label: int) -> str:
    """Rows for a reader."""
    head = (
        f"{'arm':<{label}} {'T':>4} {'SR':>6} {'95 %':>13} {'tau':>6} {'depth':>6} {'nodes':>6} "
        f"{'target':>7} {'drafter':>8} {'seconds':>8} {'= AR':>6}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        low, high = row["SR_95"]
        span = f"{low:.2f}-{high:.2f}"
        lines.append(
            f"{row['arm']:<{label}} {row['temperature']:>4g} {row['SR']:>6.2f} {span:>13} {row['tau']:>6.2f} "
            f"{row['mean_depth']:>6.2f} {row['mean_nodes']:>6.1f} {row['target_calls']:>7.1f} "
            f"{row['drafter_calls']:>8.1f} {row['median_s']:>8.3f} {row['same_image']:>6.0%}"
        )
    return "\n".join(lines)
