"""Marks the parts of a step by name, so that a profile can report each part's share of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch.profiler import record_function

Span = tuple[int, int, str]  # start and end in nanoseconds, name
NOTHING = nullcontext()
CLOCKED: ContextVar[list[Span] | None] = ContextVar("clocked", default=None)  # None outside clocked()


def part(name: str) -> AbstractContextManager[object]:
    """Returns a context that marks its block as a part of the step.

    Inside clocked() the part is timed by the clock; otherwise torch's profiler records it, if one runs. If
    none runs, the context does nothing, because record_function would cost ten microseconds.
    """
    spans = CLOCKED.get()
    if spans is not None:
        return _span(name, spans)
    return record_function(name) if torch.autograd._profiler_enabled() else NOTHING


@contextmanager
def clocked() -> Iterator[list[Span]]:
    """Yields a list that receives the parts which end within the block.

    On a CPU the clock is enough, and torch's profiler would distort the shares: it records every operator,
    which makes many small operators look slower than a few large ones.
    """
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
