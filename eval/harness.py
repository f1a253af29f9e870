"""The harness: configurations timed on the same prompts and seeds, each next to the AR baseline.

All of it happens in one process. A batch of prompts goes through every configuration before the next batch
does, and a different configuration starts each time, so that whatever else the machine does slows all of them
alike. Warm-up is not timed, and clocks are read when the device has finished.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from adt_tree.method import METHODS
from adt_tree.records import Decoded, size_shares, tau
from adt_tree.roles import Request
from eval.runs.measurements import Measured, Measurements
from eval.runs.process import synchronise

BASELINE = "ar"
RESAMPLES = 10_000  # random samples of the bootstrap
OURS = "self-draft"
RIVALS = tuple(name for name, spec in METHODS.items() if spec.rival)
REFILLS = 4  # a batch of prompts is at least this many times as large as the number of images in flight


class Decodes(Protocol):
    """Anything that turns requests into images: an adt_tree.engine.Engine or a decoder of eval.baseline."""

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yields finished images."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One combination of what bench varies; its fields are the first columns of its row."""

    method: str  # the label, such as adt-tree-lantern
    temperature: float
    batch_size: int
    total_token: int | str | None = None  # nodes of the largest dynamic tree, root included
    varied: tuple[tuple[str, Any], ...] = ()  # the options of --vary that the method reads, with their values
    exact: bool = True  # whether it must generate the AR baseline's image at the same seed

    @property
    def name(self) -> str:
        """Returns a name that no other configuration of the run has."""
        values = {name: getattr(self, name) for name in ("temperature", "batch_size", "total_token")}
        values |= dict(self.varied)
        words = [f"{key}={value}" for key, value in values.items() if value is not None]
        return " ".join([self.method, *words])

    @property
    def baseline(self) -> str:
        """Returns the name of the AR baseline of the same temperature and batch size."""
        return Configuration(BASELINE, self.temperature, self.batch_size).name


Results = dict[str, list[Measured]]  # name of a configuration -> one entry per batch of prompts


def measure(
    decoders: Mapping[Configuration, Decodes],
    requests: Sequence[Request],
    store: Measurements,
    warmup: int,
    device: torch.device,
) -> Results:
    """Returns the times and images of every configuration on all requests.

    A batch of prompts whose measurements are in `store` is not measured again; the others are added to it.
    warmup: number of images that each configuration generates first, if any batch is left to measure.
    """
    batches = turns(requests, max(configuration.batch_size for configuration in decoders))
    pending = sum(store.finished(number) is None for number in range(len(batches)))
    order = list(decoders)
    results = {configuration.name: list[Measured]() for configuration in decoders}
    with tqdm(total=len(order) * (pending + bool(warmup and pending)), unit="run") as bar:

        def measure_one(configuration: Configuration, batch: Sequence[Request]) -> Measured:
            bar.set_postfix_str(configuration.name, refresh=False)
            measured = timed(decoders[configuration], batch, device)
            bar.update()
            return measured

        warm_up = replace(requests[0], name="warm-up", seed=requests[0].seed + 1)
        for configuration in order if warmup and pending else ():
            measure_one(configuration, [warm_up] * warmup)
        for number, batch in enumerate(batches):
            measured = store.finished(number)
            if measured is None:
                first = number % len(order)
                rotated = (*order[first:], *order[:first])
                measured = {item.name: measure_one(item, batch) for item in rotated}
                store.add(number, [request.name for request in batch], measured)
            for name, entries in results.items():
                entries.append(measured[name])
    return results


def turns(requests: Sequence[Request], batch_size: int) -> list[Sequence[Request]]:
    """Returns the requests in the batches of prompts that every configuration decodes in turn.

    batch_size: the number of images in flight, B. With B = 1 a batch of prompts is one image, else it has at
    least REFILLS * B images, or all if there are fewer. So most images that finish leave their slot to
    another, as in a long run, and the last steps, in which slots are empty, weigh little.
    """
    size = 1 if batch_size == 1 else REFILLS * batch_size
    count = max(1, len(requests) // size)
    cuts = [len(requests) * number // count for number in range(count + 1)]
    return [requests[start:end] for start, end in pairwise(cuts)]


def timed(decoder: Decodes, requests: Sequence[Request], device: torch.device) -> Measured:
    """Decodes a batch of prompts and measures the seconds it takes."""
    synchronise(device)
    started = time.perf_counter()
    images = list(decoder.decode(iter(requests)))
    synchronise(device)
    seconds = (time.perf_counter() - started) / len(requests)
    return Measured(seconds, sorted(images, key=lambda image: image.name))


def rows(configurations: Iterable[Configuration], results: Results) -> list[dict[str, Any]]:
    """Returns a row per configuration, compared with the AR baseline of its temperature and batch size."""
    return [row(item, results[item.name], results[item.baseline]) for item in configurations]


def row(
    configuration: Configuration, measured: Sequence[Measured], baseline: Sequence[Measured]
) -> dict[str, Any]:
    """Returns one row of the result.

    SR, the speed-up, is the median over batches of prompts of the baseline's seconds divided by the
    configuration's, both of the same run.
    """
    seconds = np.array([entry.seconds for entry in measured])
    ratios = np.array([entry.seconds for entry in baseline]) / seconds
    images = [image for entry in measured for image in entry.images]
    expected = {image.name: image.codes for entry in baseline for image in entry.images}
    steps = [step for image in images for step in image.steps]
    count, calls = len(images), sum(image.target_calls for image in images)
    total = sum(entry.seconds * len(entry.images) for entry in measured)
    return {
        "method": configuration.method,
        "temperature": configuration.temperature,
        "batch_size": configuration.batch_size,
        "total_token": configuration.total_token,
        "varied": dict(configuration.varied),
        "exact": configuration.exact,
        "SR": round(float(np.median(ratios)), 3),
        "SR_95": [round(bound, 3) for bound in interval(ratios)],
        "tau": round(tau(images), 3),
        "tau_95": [round(bound, 3) for bound in tau_interval(images)],
        "mean_depth": round(sum(image.mean_depth for image in images) / count, 3),
        "mean_nodes": round(sum(image.mean_nodes for image in images) / count, 2),
        "tree_sizes": size_shares(image.tree_sizes for image in images),
        "target_calls": round(calls / count, 2),
        "drafter_calls": round(sum(image.drafter_calls for image in images) / count, 2),
        "step_ms": round(float(np.median([step.ms for step in steps])), 3),
        "median_s": round(float(np.median(seconds)), 4),
        "images_per_min": round(60 * count / total, 2),
        "images": count,
        "same_image": round(sum(image.codes == expected[image.name] for image in images) / count, 3),
    }


def leads(configurations: Iterable[Configuration], results: Results) -> list[dict[str, Any]]:
    """Returns how far self-drafting is ahead of the best rival in tau, for every temperature, batch size and
    tree size at which both were measured. The better of several variants counts on either side."""
    groups: dict[tuple[Any, ...], dict[bool, list[tuple[float, Configuration, list[Decoded]]]]] = {}
    for item in configurations:
        name = item.method.partition(":")[0]
        if name not in (OURS, *RIVALS):
            continue
        images = [image for entry in results[item.name] for image in entry.images]
        group = groups.setdefault((item.temperature, item.batch_size, item.total_token), {})
        group.setdefault(name == OURS, []).append((tau(images), item, images))
    answer = []
    for (temperature, batch_size, total_token), group in groups.items():
        if len(group) < 2:
            continue
        ours, rival = (max(group[side], key=lambda entry: entry[0]) for side in (True, False))
        answer.append(
            {
                "temperature": temperature,
                "batch_size": batch_size,
                "total_token": total_token,
                "method": " ".join([ours[1].method, *map(str, dict(ours[1].varied).values())]),
                "rival": " ".join([rival[1].method, *map(str, dict(rival[1].varied).values())]),
                "tau": [round(ours[0], 3), round(rival[0], 3)],
                "lead_95": [round(bound, 3) for bound in tau_interval(ours[2], rival[2])],
            }
        )
    return answer


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Returns a bootstrap 95 % interval of the median."""
    return percentiles(np.median(ratios[resamples(len(ratios))], axis=1))


def tau_interval(images: Sequence[Decoded], rival: Sequence[Decoded] | None = None) -> tuple[float, float]:
    """Returns a bootstrap 95 % interval of tau over images, or of its lead over a rival's images of the same
    names, which are resampled in pairs."""
    picks = resamples(len(images))

    def resampled(these: Sequence[Decoded]) -> np.ndarray:
        codes, calls = counts(sorted(these, key=lambda image: image.name))
        return codes[picks].sum(axis=1) / np.maximum(calls[picks].sum(axis=1), 1)

    return percentiles(resampled(images) - (0.0 if rival is None else resampled(rival)))


def counts(images: Sequence[Decoded]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes that the steps of each image committed, and its target calls."""
    codes = [sum(step.accepted + 1 for step in image.steps) for image in images]
    return np.array(codes), np.array([image.target_calls for image in images])


def resamples(count: int) -> np.ndarray:
    """Returns the indices [RESAMPLES, count] of random samples of `count` items with replacement. They are
    the same at every call."""
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Returns the bounds of the middle 95 %."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
