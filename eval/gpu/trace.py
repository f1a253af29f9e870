"""Reads torch's profiler: how many kernels the host launches, and which kernels compute attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from eval.runs.process import synchronise

# Calls of the CUDA runtime, and of the driver for compiled kernels, that put work on the device.
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")
ATTENTION = "aten::scaled_dot_product_attention"
BACKEND = "aten::_scaled_dot_product"  # prefix of the operators between which ATTENTION chooses


def profiled(run: Callable[[], Any], device: torch.device) -> list[FunctionEvent]:
    """Returns the events of run(), which should be a few steps: each step has thousands of events."""
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
        run()
        synchronise(device)
    return list(profiler.events())


def launches(events: Iterable[FunctionEvent]) -> int:
    """Returns how many kernels, graphs, copies and fills the host launched.

    A call of the runtime that shows again as one of the driver has the same correlation id and counts once.
    """
    return len({event.id for event in events if LAUNCH.match(event.name)})


def attention(events: Iterable[FunctionEvent]) -> dict[str, list[str]]:
    """Returns the backends that scaled_dot_product_attention chose, each with the kernels that it ran.

    Kernels inside a CUDA graph do not show which operator they belong to, so the events must be eager ones.
    On a CPU there are backends and no kernels.
    """
    chosen: dict[str, set[str]] = {}
    for event in events:
        if event.name == ATTENTION:
            for backend in event.cpu_children:
                if backend.name.startswith(BACKEND):
                    kernels = chosen.setdefault(backend.name.removeprefix("aten::"), set())
                    kernels |= {kernel.name for inner in _below(event) for kernel in inner.kernels}
    return {backend: sorted(kernels) for backend, kernels in chosen.items()}


def _below(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """Yields an event and all events within it."""
    yield event
    for child in event.cpu_children:
        yield from _below(child)
