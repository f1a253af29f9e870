"""The harness: configurations timed on the same prompts and seeds, each next to the AR baseline.

All of it happens in one process. The configurations decode a batch of prompts at the same time, in turns of a
quarter of a second, so that whatever else the machine does slows all of them alike. A different configuration
starts with every batch. Warm-up is not timed, and clocks are read when the device has finished.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from tqdm import tqdm

from adt_tree.records import Decoded
from adt_tree.roles import Request
from storage.measurements import Batch, Measured, Measurements
from storage.process import synchronise

BASELINE, OTHER_SEEDS = "ar", "ar, other seeds"
SLICE = 0.25  # seconds for which a configuration decodes before the next one does
REFILLS = 4  # a batch of prompts is at least this many times as large as the number of images in flight


class Outcome(Protocol):
    """The outcome of a step, such as adt_tree.batch.StepOutput."""

    @property
    def committed(self) -> int:
        """Number of codes that the step committed."""

    @property
    def finished(self) -> list[Decoded]:
        """The images that the step completed."""


class Decodes(Protocol):
    """Anything that turns requests into images: an adt_tree.engine.Engine, or a decoder of
    eval.baseline or eval.quality."""

    def steps(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Yields the outcome of every step as it happens."""


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

    @property
    def other_seeds(self) -> Configuration:
        """Returns the configuration of that baseline at other seeds, which bench --quality measures too."""
        return Configuration(OTHER_SEEDS, self.temperature, self.batch_size, exact=False)


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
    batches = portions(requests, max(configuration.batch_size for configuration in decoders))
    numbers = range(len(batches))
    found = {number: batch for number in numbers if (batch := store.finished(number)) is not None}
    missing = [number for number in numbers if number not in found]
    warm_up = replace(requests[0], name="warm-up", seed=requests[0].seed + 1)
    warm_ups = [warm_up] * warmup if missing else []
    order = list(decoders)
    count = len(warm_ups) + sum(len(batches[number]) for number in missing)
    with tqdm(total=len(order) * count, unit="image") as bar:
        if warm_ups:
            interleaved(decoders, warm_ups, device, bar)
        for number in missing:
            first = number % len(order)
            rotated = {item: decoders[item] for item in (*order[first:], *order[:first])}
            found[number] = measured = interleaved(rotated, batches[number], device, bar)
            store.add(number, measured)
    return {item.name: [found[number][item.name] for number in numbers] for item in order}


def portions(requests: Sequence[Request], batch_size: int) -> list[Sequence[Request]]:
    """Returns the requests in batches of prompts. All configurations decode one batch before the next begins.

    batch_size: the number of images in flight, B. With B = 1 a batch of prompts is one image. Otherwise it
    has at least REFILLS * B images, or all if there are fewer, so that most slots are refilled as in a long
    run. In the last steps of a batch some slots are empty: about a seventh of the time of methods that draft
    (docs/LOG.md).
    """
    size = 1 if batch_size == 1 else REFILLS * batch_size
    count = max(1, len(requests) // size)
    cuts = [len(requests) * number // count for number in range(count + 1)]
    return [requests[start:end] for start, end in pairwise(cuts)]


def interleaved(
    decoders: Mapping[Configuration, Decodes], requests: Sequence[Request], device: torch.device, bar: tqdm
) -> Batch:
    """Returns the times and images of every configuration on a batch of prompts.

    The configuration that has committed fewest codes decodes for SLICE seconds, or for one step if that takes
    longer; then the one that now has fewest does, until all have all images. So a fast configuration waits
    for the slow ones, and each spends its time at the same moments as the others.
    """
    running = {item: decoder.steps(iter(requests)) for item, decoder in decoders.items()}
    seconds, codes = dict.fromkeys(decoders, 0.0), dict.fromkeys(decoders, 0)
    images = {item: list[Decoded]() for item in decoders}
    synchronise(device)
    while running:
        item = min(running, key=codes.__getitem__)
        before = len(images[item])
        started = time.perf_counter()
        for outcome in running[item]:
            codes[item] += outcome.committed
            images[item] += outcome.finished
            if time.perf_counter() - started > SLICE:
                break
        else:
            del running[item]
        synchronise(device)
        seconds[item] += time.perf_counter() - started
        bar.update(len(images[item]) - before)
    return {
        item.name: Measured(seconds[item] / len(requests), sorted(images[item], key=lambda image: image.name))
        for item in decoders
    }
