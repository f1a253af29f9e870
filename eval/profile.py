"""Where the time of decoding goes, by the parts that the loop marks (adt_tree.ranges), and a lower bound of a
step's time: reading the target's weights once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from adt_tree.engine import Engine
from adt_tree.ranges import Span, clocked, part
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from models import footprint
from models.model import Model
from storage.process import synchronise

# The parts of decoding, marked by the loop, and the pixels of the images that it yields.
PARTS = ("prefill", "noise", "target", "drafter", "tree", "verify", "commit", "pixels")
PROBE_BYTES, PROBES = 2**28, 5  # size and number of the probes that measure the bandwidth of memory
COPIES = 16  # copies per probe on a GPU: waiting for a single copy would add a tenth to its time


def profile(engines: Mapping[str, Engine], requests: Sequence[Request], model: Model) -> dict[str, Any]:
    """Returns what --profile adds to a result of bench. engines: by the names of their configurations."""
    parts = [
        {"configuration": name, "shares": shares(engine, requests, model)} for name, engine in engines.items()
    ]
    return {"weights_read": weights_read(model), "profile": parts}


def shares(engine: Engine, requests: Sequence[Request], model: Model) -> dict[str, float]:
    """Returns the fraction of the wall clock that each part takes, from encoded prompts to pixels, or to
    codes if the model makes no pixels; "host" is the rest, the loop itself.

    Time in a part within another part counts for the inner one alone. On CUDA a part lasts on the device from
    its first kernel to its last, and "host" is the time in which the device has nothing to do. With CUDA
    graphs "target" includes verifying and committing, which are in one recording with it.
    """
    cuda = engine.target.device.type == "cuda"
    started = time.perf_counter_ns()
    spans = (_kernels if cuda else _clock)(engine, requests, model)
    total = time.perf_counter_ns() - started
    times = exclusive_time(spans)
    parts = {name: times.get(name, 0) / total for name in PARTS}
    return {name: round(share, 4) for name, share in {**parts, "host": 1 - sum(parts.values())}.items()}


def memory(model: Model, engines: Iterable[Engine]) -> dict[str, int]:
    """Returns the peak of the bytes in tensors on the GPU since the process began, and the estimate for the
    weights, the engines and one step of each."""
    networks = (model.decoder, model.drafter_net, model.codec)
    tensors = [x for network in networks if isinstance(network, nn.Module) for x in network.parameters()]
    estimate = sum(x.nbytes for x in tensors if x.is_cuda)
    for engine in engines:
        target = engine.target
        dims = model.dimensions(
            target.slots, engine.method.ordered_sampling, engine.max_nodes, target.max_prompt
        )
        estimate += footprint.decoding_peak(replace(dims, side=0))
    return {"peak_bytes": torch.cuda.max_memory_allocated(model.device), "estimate_bytes": estimate}


def compile_seconds() -> float:
    """Returns the time that torch.compile has taken since the process began."""
    from torch._dynamo.utils import calculate_time_spent  # takes seconds to import

    return round(calculate_time_spent()["total_wall_time"], 1)


def _draw(engine: Engine, requests: Sequence[Request], model: Model) -> None:
    """Decodes the requests, and makes pixels of the images if the model can."""
    for image in engine.decode(iter(requests)):
        if not model.missing_for_pixels:
            with part("pixels"):
                model.image(image.codes)


def _clock(engine: Engine, requests: Sequence[Request], model: Model) -> list[Span]:
    """Returns the spans of the parts, timed by the host's clock."""
    with clocked() as spans:
        _draw(engine, requests, model)
    return spans


def _kernels(engine: Engine, requests: Sequence[Request], model: Model) -> list[Span]:
    """Returns the spans of the parts on the device, from torch's profiler."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _draw(engine, requests, model)
        synchronise(engine.target.device)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    # profiler.events() would build a tree of all events, which takes half a minute.
    events = profiler.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.is_user_annotation() and event.device_type() == DeviceType.CUDA
    ]


def exclusive_time(spans: Iterable[Span]) -> dict[str, int]:
    """Returns the time of each part without the time of the parts within it.

    Example: a tree from 0 to 100 around a drafter from 10 to 40 takes 70, the drafter 30.
    """
    times: dict[str, int] = {}
    enclosing: list[Span] = []  # the spans around the current one, outermost first
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        start, end, part = span
        while enclosing and enclosing[-1][1] <= start:
            enclosing.pop()
        times[part] = times.get(part, 0) + end - start
        if enclosing:
            times[enclosing[-1][2]] -= end - start
        enclosing.append(span)
    return times


def weights_read(model: Model) -> dict[str, float]:
    """Returns the size of the target's weights, the bandwidth of memory copies here, and the milliseconds
    that one reading of the weights takes at this bandwidth.

    With a drafter also the share of these weights that a pass of it reads. No step can be faster unless the
    weights stay in a cache. The embedding does not count, because a step reads only a few of its rows.
    """
    device = model.decoder.embed.weight.device
    per_value = model.decoder.embed.weight.element_size()
    values = footprint.weights_read(model.decoder.config, model.num_codes)
    source = torch.ones(PROBE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copies, seconds = COPIES if device.type == "cuda" else 1, []
    for _ in range(PROBES):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        synchronise(device)
        seconds.append((time.perf_counter() - started) / copies)
    bandwidth = 2 * PROBE_BYTES / min(seconds)  # read and written
    read = {
        "weights_mb": round(values * per_value / 1e6, 2),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "read_ms": round(1e3 * values * per_value / bandwidth, 3),
    }
    if model.drafter_net is not None:
        read["drafter_share"] = round(drafter_share(model), 4)
    return read


def drafter_share(model: Model) -> float:
    """Returns what a pass of the model's drafter reads, over a pass of the target; 0 if it has none."""
    if model.drafter_net is None:
        return 0.0
    return footprint.drafter_share(model.dimensions(1, Sampling(), 1, 1))
