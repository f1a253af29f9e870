"""Decoding for the page: a race, a sheet of pictures, and the flag that ends either at the next step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from PIL import Image

from adt_tree.errors import UserError
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from eval.race import Recorder, embedded

TOLD_EVERY_S = 0.3  # between two lines of progress
News = tuple[str, Any]  # a line for the visitor, and what to show under it: None for what is there already


@dataclass(slots=True)
class Job:
    """One visitor's decoding: how far it is, and whether it is to end."""

    progress: str = "before the first code"
    cancelled: Event = field(default_factory=Event)


class Cancelled(Exception):
    """The visitor wants no more of it."""


def race(pipe: Pipeline, job: Job, prompt: str, seed: int, methods: Sequence[Method]) -> Iterator[News]:
    """Decode the prompt with one method after the other, then show both at once. Ends as watch() does."""
    recordings = []
    for method in methods:
        for recorder in watch(pipe, job, [prompt], seed, method):
            yield f"{method.label}: painting the partial images" if recorder.done else job.progress, None
        recordings.append(recorder.finish())
    yield "Done.", embedded(recordings)


def sheet(
    pipe: Pipeline, job: Job, prompts: Sequence[str], seed: int, method: Method, batch_size: int
) -> Iterator[News]:
    """Pictures of all prompts with their tau, in the prompts' order, as they finish. Ends as watch() does."""
    tiles: dict[int, tuple[Image.Image, str]] = {}
    shown = None
    for recorder in watch(pipe, job, prompts, seed, method, batch_size):
        if recorder.done:
            tiles[recorder.seed] = pipe.image(recorder.codes), f"tau {recorder.tau:.2f}: {recorder.prompt}"
            shown = [tiles[seed] for seed in sorted(tiles)]
        yield job.progress, shown if recorder.done else None
    yield "Done.", shown


def watch(
    pipe: Pipeline, job: Job, prompts: Sequence[str], seed: int, method: Method, batch_size: int = 1
) -> Iterator[Recorder]:
    """A prompt's steps so far: now and then, and once its image is complete.

    Cancelled at the first step after the flag is up. UserError for what the model cannot draw.
    """
    size, told = pipe.model.grid.size, time.perf_counter()
    recorders = [Recorder(pipe, method, text, seed + place) for place, text in enumerate(prompts)]
    stream = pipe.stream(prompts, method=method, seed=seed, batch_size=batch_size)
    try:
        with closing(stream):
            for step in stream:
                recorder = recorders[step.image]
                recorder.add(step)
                of = f", picture {step.image + 1} of {len(recorders)}" if len(recorders) > 1 else ""
                codes, calls = len(recorder.codes), len(recorder.steps)
                job.progress = f"{method.label}{of}: {codes} of {size} codes, {calls} target calls"
                if job.cancelled.is_set():
                    raise Cancelled
                if recorder.done or time.perf_counter() - told > TOLD_EVERY_S:
                    told = time.perf_counter()
                    yield recorder
    except (ValueError, FloatingPointError) as error:
        raise UserError(f"{error}.") from None


def warm_up(pipe: Pipeline, names: list[str], steps: int = 3) -> None:
    """A few steps of each method, so that no race pays for what is only slow once."""
    for name in names:
        with closing(pipe.stream("warm-up", method=name, seed=0)) as stream:
            for _, _ in zip(range(steps), stream, strict=False):
                pass
