"""Decoding for the page: a race, a sheet of pictures, and the flag that ends either at the next step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

from PIL import Image

from adt_tree.pipeline import Pipeline
from demo.wishes import Wish
from eval.errors import UserError
from eval.race import Recorder, Recording

TOLD_EVERY_S = 0.3  # between two lines of progress
Tile = tuple[Image.Image, str]


@dataclass(slots=True)
class Job:
    """One visitor's decoding: how far it is, and whether it is to end."""

    progress: str = "before the first code"
    cancelled: Event = field(default_factory=Event)


class Cancelled(Exception):
    """The visitor wants no more of it."""


def race(pipe: Pipeline, wish: Wish, job: Job) -> Iterator[str | list[Recording]]:
    """Decode the prompt with one method after the other: lines of progress, at last the recordings.

    Cancelled at the first step after the flag is up. UserError for what the model cannot draw.
    """
    recordings = []
    for method in wish.methods:
        recorder = Recorder(pipe, method, wish.prompts[0], wish.seed)
        told = time.perf_counter()
        stream = pipe.stream(wish.prompts[0], method=method, seed=wish.seed)
        try:
            for step in stream:
                recorder.add(step)
                size, calls = recorder.grid.size, len(recorder.steps)
                job.progress = f"{method.label}: {len(recorder.codes)} of {size} codes, {calls} target calls"
                if job.cancelled.is_set():
                    raise Cancelled
                if time.perf_counter() - told > TOLD_EVERY_S:
                    told = time.perf_counter()
                    yield job.progress
        except (ValueError, FloatingPointError) as error:
            raise UserError(f"{error}.") from None
        finally:
            stream.close()
        yield f"{method.label}: painting the partial images"
        recordings.append(recorder.finish())
        if job.cancelled.is_set():
            raise Cancelled
    yield recordings


def sheet(pipe: Pipeline, wish: Wish, job: Job, batch_size: int) -> Iterator[list[Tile]]:
    """Pictures of all prompts with their tau, in the prompts' order, as they finish. Ends as race() does."""
    method, size = wish.methods[0], pipe.model.grid.size
    recorders = [Recorder(pipe, method, text, wish.seed + place) for place, text in enumerate(wish.prompts)]
    tiles: dict[int, Tile] = {}
    stream = pipe.stream(wish.prompts, method=method, seed=wish.seed, batch_size=batch_size)
    try:
        for step in stream:
            recorder = recorders[step.image]
            recorder.add(step)
            done, codes = f"{len(tiles)} of {len(recorders)} pictures", len(recorder.codes)
            job.progress = f"{done}; the next has {codes} of {size} codes"
            if job.cancelled.is_set():
                raise Cancelled
            if recorder.done:
                tau = (size - 1) / max(len(recorder.steps), 1)
                tiles[step.image] = pipe.image(recorder.codes), f"tau {tau:.2f}: {recorder.prompt}"
                yield [tiles[place] for place in sorted(tiles)]
    except (ValueError, FloatingPointError) as error:
        raise UserError(f"{error}.") from None
    finally:
        stream.close()


def warm_up(pipe: Pipeline, names: list[str], steps: int = 3) -> None:
    """A few steps of each method, so that no race pays for what is only slow once."""
    for name in names:
        stream = pipe.stream("warm-up", method=name, seed=0)
        for _, _ in zip(range(steps), stream, strict=False):
            pass
        stream.close()
