"""Named ranges of a step, which `bench --profile` turns into shares of time; free while nobody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch.profiler import record_function

Span = tuple[int, int, str]  # start and end in nanoseconds, name
NOTHING = nullcontext()
CLOCKED: ContextVar[list[Span] | None] = ContextVar("clocked", default=None)  # where clocked() keeps them


def part(name: str) -> AbstractContextManager[object]:
    """A range of that name, by the clock in clocked(), else in torch's profiler if one runs: a
    record_function would cost ten microseconds."""
    spans = CLOCKED.get()
    if spans is not None:
        return _span(name, spans)
    return record_function(name) if torch.autograd._profiler_enabled() else NOTHING


@contextmanager
def clocked() -> Iterator[list[Span]]:
    """The ranges that end in the block. On a CPU that is all there is to know of them; a profiler, which
    records every operator, would make many small operators look slower than a few large ones."""
    spans: list[Span] = []
    token = CLOCKED.set(spans)
    try:
        yield spans
    finally:
        CLOCKED.reset(token)


@contextmanager
def _span(name: str, spans: list[Span]) -> Iterator[None]:
    start = time.perf_counter_ns()
    yield
    spans.append((start, time.perf_counter_ns(), name))
