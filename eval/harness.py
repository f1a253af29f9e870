"""The harness: configurations timed on the same prompts and seeds, each next to the AR baseline.

All of it happens in one process. The configurations decode a batch of prompts at the same time: each runs for
a quarter of a second, then the next one does, so that whatever else the machine does slows all of them alike.
A different configuration starts with every batch. Warm-up is not timed, and clocks are read when the device
has finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from tqdm import tqdm

from adt_tree.records import Decoded
from adt_tree.roles import Request
from eval.runs.measurements import Batch, Measured, Measurements
from eval.runs.process import synchronise

BASELINE = "ar"
SLICE = 0.25  # seconds for which a configuration decodes before the next one does
REFILLS = 4  # a batch of prompts is at least this many times as large as the number of images in flight


class Outcome(Protocol):
    """The outcome of a step, such as adt_tree.batch.StepOutput."""

    @property
    def finished(self) -> list[Decoded]:
        """The images that the step completed."""


class Decodes(Protocol):
    """Anything that turns requests into images: an adt_tree.engine.Engine or a decoder of eval.baseline."""

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
    pending = [number for number in range(len(batches)) if store.finished(number) is None]
    warm_up = replace(requests[0], name="warm-up", seed=requests[0].seed + 1)
    warm_ups = [warm_up] * warmup if pending else []
    order = list(decoders)
    count = len(warm_ups) + sum(len(batches[number]) for number in pending)
    with tqdm(total=len(order) * count, unit="image") as bar:
        if warm_ups:
            interleaved(decoders, warm_ups, device, bar)
        for number in pending:
            first = number % len(order)
            rotated = {item: decoders[item] for item in (*order[first:], *order[:first])}
            measured = interleaved(rotated, batches[number], device, bar)
            store.add(number, [request.name for request in batches[number]], measured)
    stored = [store.finished(number) for number in range(len(batches))]
    return {item.name: [batch[item.name] for batch in stored if batch] for item in order}


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


def interleaved(
    decoders: Mapping[Configuration, Decodes], requests: Sequence[Request], device: torch.device, bar: tqdm
) -> Batch:
    """Returns the times and images of every configuration on a batch of prompts.

    Each configuration in turn decodes for SLICE seconds, or for one step if that takes longer, until it has
    all images. An image's own `seconds` contain the turns of the other configurations.
    """
    waiting = deque((item, decoder.steps(iter(requests))) for item, decoder in decoders.items())
    seconds, finished = dict.fromkeys(decoders, 0.0), {item: list[Decoded]() for item in decoders}
    while waiting:
        item, steps = waiting.popleft()
        images, before = finished[item], len(finished[item])
        bar.set_postfix_str(item.name, refresh=False)
        synchronise(device)
        started = time.perf_counter()
        for outcome in steps:
            images += outcome.finished
            if time.perf_counter() - started > SLICE:
                waiting.append((item, steps))
                break
        synchronise(device)
        seconds[item] += time.perf_counter() - started
        bar.update(len(images) - before)
    return {
        item.name: Measured(seconds[item] / len(images), sorted(images, key=lambda image: image.name))
        for item, images in finished.items()
    }
