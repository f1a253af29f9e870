"""torch's settings that hold for a whole process or thread, and that a caller may have changed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

Step = TypeVar("Step")
CPU = torch.device("cpu")


@contextmanager
def own_settings() -> Iterator[None]:
    """Computes with torch's initial dtype and device and without autocast, and restores the caller's."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def with_own_settings(steps: Iterator[Step]) -> Iterator[Step]:
    """Yields what an iterator yields; if it is a generator, it is closed at the end. Each of its steps runs
    under own_settings(), the caller's code between them under the caller's settings."""
    try:
        while True:
            with own_settings():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step
    finally:
        if isinstance(steps, Generator):
            steps.close()
