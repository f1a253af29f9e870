"""Where the time of a decode goes, by the ranges that the loop marks.

Beside it the least a step can take: reading the target's weights once. Not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from adt_tree.engine import Engine
from adt_tree.ranges import Span, clocked
from adt_tree.roles import Request
from eval.runs.session import synchronise
from models.memory import count
from models.model import Model
from models.transformer import Block

PARTS = ("target", "drafter", "tree", "verify", "commit")  # the loop's ranges
PROBE_BYTES, PROBES = 2**28, 5


def shares(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Fractions of the wall clock in each part; host is the rest, the loop itself.

    Time in a nested range counts for that range alone. On CUDA a part's time is the device's between its
    first and last kernel, and host what the device idles.
    """
    cuda = engine.target.device.type == "cuda"
    started = time.perf_counter_ns()
    spans = _kernels(engine, requests) if cuda else _clock(engine, requests)
    total = time.perf_counter_ns() - started
    found = own_time(spans)
    parts = {part: found.get(part, 0) / total for part in PARTS}
    return {part: round(share, 4) for part, share in {**parts, "host": 1 - sum(parts.values())}.items()}


def _clock(engine: Engine, requests: Sequence[Request]) -> list[Span]:
    """The ranges of a decode by the process's clock."""
    with clocked() as spans:
        for _ in engine.decode(iter(requests)):
            pass
    return spans


def _kernels(engine: Engine, requests: Sequence[Request]) -> list[Span]:
    """The ranges of a decode on the device, by torch's profiler."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in engine.decode(iter(requests)):
            pass
        synchronise(engine.target.device)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    # profiler.events() would take half a minute to build a tree of them.
    events = profiler.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.is_user_annotation() and event.device_type() == DeviceType.CUDA
    ]


def own_time(spans: Iterable[Span]) -> dict[str, int]:
    """Time by part, that of nested spans left out of what they lie in."""
    found: dict[str, int] = {}
    around: list[Span] = []
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        start, end, part = span
        while around and around[-1][1] <= start:
            around.pop()
        found[part] = found.get(part, 0) + end - start
        if around:
            found[around[-1][2]] -= end - start
        around.append(span)
    return found


def weights_read(model: Model) -> dict[str, float]:
    """Milliseconds to read the target's weights once at the measured copy bandwidth.

    No step can be faster unless the weights stay in a cache. Embedding and unused head rows are not read.
    """
    device = model.decoder.embed.weight.device
    config, per_value = model.decoder.config, model.decoder.embed.weight.element_size()
    values = config.num_layers * count(lambda: Block(config)) + model.num_codes * config.hidden_size
    source = torch.ones(PROBE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(PROBES):
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    bandwidth = 2 * PROBE_BYTES / min(seconds)  # read and written
    return {
        "weights_mb": round(values * per_value / 1e6, 2),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "read_ms": round(1e3 * values * per_value / bandwidth, 3),
    }
