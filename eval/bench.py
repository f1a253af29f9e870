"""The harness: configurations timed on the same prompts and seeds, each beside the AR baseline.

In one process a batch of prompts goes through every configuration before the next batch, and another
configuration is first each time: what the machine does meanwhile falls on all of them alike. Warm-up is not
timed, and the clock waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from adt_tree.records import Decoded
from adt_tree.roles import Request
from eval.runs.measurements import Measured, Measurements
from eval.runs.session import synchronise

BASELINE = "ar"
RESAMPLES = 10_000  # of the bootstrap


class Decodes(Protocol):
    """Anything that turns requests into images."""

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Finished images."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One combination of what bench varies; the first fields of its row."""

    method: str  # its label, such as adt-tree-lantern
    temperature: float
    batch_size: int
    total_token: int | None = None  # nodes of the largest dynamic tree, root included
    varied: tuple[tuple[str, Any], ...] = ()  # the options of --vary that the method reads, and their values
    exact: bool = True  # the AR baseline's image at the same seed is expected

    @property
    def name(self) -> str:
        """What tells it from the others."""
        values = {name: getattr(self, name) for name in ("temperature", "batch_size", "total_token")}
        told = (values | dict(self.varied)).items()
        return " ".join([self.method, *(f"{key}={value}" for key, value in told if value is not None)])

    @property
    def baseline(self) -> str:
        """The name of what it is compared with: the AR baseline, of the same temperature and batch size."""
        return Configuration(BASELINE, self.temperature, self.batch_size).name


Found = dict[str, list[Measured]]  # configuration's name -> one entry per batch of prompts


def measure(
    decoders: Mapping[Configuration, Decodes],
    requests: Sequence[Request],
    store: Measurements,
    warmup: int,
    device: torch.device,
) -> Found:
    """Time every configuration on all requests; what the store has is taken from it, the rest goes there.

    A batch of prompts is as large as the largest batch size, so that every configuration is at full speed.
    warmup: images each one makes first, if anything is left to measure.
    """
    size = max(configuration.batch_size for configuration in decoders)
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    names = [[request.name for request in batch] for batch in batches]
    pending = sum(store.finished(own) is None for own in names)
    order, found = list(decoders), {configuration.name: list[Measured]() for configuration in decoders}
    with tqdm(total=len(order) * (pending + bool(warmup and pending)), unit="run") as bar:

        def turn(configuration: Configuration, chosen: Sequence[Request]) -> Measured:
            bar.set_postfix_str(configuration.name, refresh=False)
            measured = timed(decoders[configuration], chosen, device)
            bar.update()
            return measured

        warm_up = replace(requests[0], name="warm-up", seed=requests[0].seed + 1)
        for configuration in order if warmup and pending else ():
            turn(configuration, [warm_up] * warmup)
        for number, (batch, own) in enumerate(zip(batches, names, strict=True)):
            before = store.finished(own)
            if before is None:
                first = number % len(order)
                before = {c.name: turn(c, batch) for c in (*order[first:], *order[:first])}
                store.add(own, before)
            for name, entries in found.items():
                entries.append(before[name])
    return found


def timed(decoder: Decodes, requests: Sequence[Request], device: torch.device) -> Measured:
    """Decode a batch of prompts by the clock."""
    synchronise(device)
    started = time.perf_counter()
    images = list(decoder.decode(iter(requests)))
    synchronise(device)
    seconds = (time.perf_counter() - started) / len(requests)
    return Measured(seconds, sorted(images, key=lambda image: image.name))


def rows(configurations: Iterable[Configuration], found: Found) -> list[dict[str, Any]]:
    """The result: a row per configuration, each against the AR baseline of its temperature and batch size."""
    return [row(own, found[own.name], found[own.baseline]) for own in configurations]


def row(own: Configuration, measured: Sequence[Measured], baseline: Sequence[Measured]) -> dict[str, Any]:
    """One row. SR: median over batches of prompts of the baseline's seconds / its own, in the same run."""
    seconds = np.array([entry.seconds for entry in measured])
    ratios = np.array([entry.seconds for entry in baseline]) / seconds
    images = [image for entry in measured for image in entry.images]
    expected = {image.name: image.codes for entry in baseline for image in entry.images}
    steps = [step for image in images for step in image.steps]
    count, calls = len(images), sum(image.target_calls for image in images)
    total = sum(entry.seconds * len(entry.images) for entry in measured)
    return {
        "method": own.method,
        "temperature": own.temperature,
        "batch_size": own.batch_size,
        "total_token": own.total_token,
        "varied": dict(own.varied),
        "exact": own.exact,
        "SR": round(float(np.median(ratios)), 3),
        "SR_95": [round(bound, 3) for bound in interval(ratios)],
        "tau": round(sum(step.accepted + 1 for step in steps) / max(calls, 1), 3),
        "mean_depth": round(sum(image.mean_depth for image in images) / count, 3),
        "mean_nodes": round(sum(image.mean_nodes for image in images) / count, 2),
        "target_calls": round(calls / count, 2),
        "drafter_calls": round(sum(image.drafter_calls for image in images) / count, 2),
        "step_ms": round(float(np.median([step.ms for step in steps])), 3),
        "median_s": round(float(np.median(seconds)), 4),
        "images_per_min": round(60 * count / total, 2),
        "images": count,
        "same_image": round(sum(image.codes == expected[image.name] for image in images) / count, 3),
    }


def interval(ratios: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    picks = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
    return float(low), float(high)
