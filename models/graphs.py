"""Passes captured once a shape as CUDA graphs and replayed: one launch where there were hundreds.

A graph repeats its kernels on the memory it was captured with. So its inputs are copied into buffers of its
own, sizes come in tiers for one graph to serve many cycles, and results are copied out before another graph,
which may share the memory, is replayed. Everything happens in the order of one stream; nothing here waits but
a capture. For one CUDA device: layers spread over several are not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

ROWS = (1, 8, 16, 32, 64)  # of a target pass; above, multiples of the last
REACH = 256  # step of the bounds on committed codes
MOST = 256  # recordings of one target; what is first seen after that runs as it is
WARM_UPS = 2  # runs before a capture: libraries start, tables by shape are made


class Recording(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Run it again on the buffers it was captured with."""


class Recorder(Protocol):
    """Who captures."""

    def __call__(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        """The recording of run(), and what run() returned in it: memory that every replay writes anew."""


class CudaRecorder:
    """See Recorder: by torch.cuda.graph. All graphs share one pool of scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        """See Recorder."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile: that is none of this capture's concern.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result


@dataclass(frozen=True, slots=True)
class _Held:
    """A recording with its buffers."""

    inputs: tuple[Tensor, ...]
    recording: Recording
    result: Any


class Replays:
    """See adt_tree.passes.Passes: a pass is captured when its function, numbers and shapes are first seen."""

    def __init__(self, record: Recorder, size: int) -> None:
        """size: tokens of an image."""
        self._record, self._size = record, size
        self._held: dict[Hashable, _Held] = {}

    @property
    def captured(self) -> int:
        """Recordings held."""
        return len(self._held)

    def nodes(self, count: int) -> int:
        """See Passes: the next tier."""
        return next((tier for tier in ROWS if tier >= count), -(-count // ROWS[-1]) * ROWS[-1])

    def reach(self, reach: int) -> int:
        """See Passes: the next multiple of REACH, or the whole image."""
        return min(-(-reach // REACH) * REACH, self._size)

    def __call__(self, function: Callable[..., Any], host: tuple[Hashable, ...], *tensors: Tensor) -> Any:
        """See Passes."""
        key = (function, host, *((x.shape, x.dtype) for x in tensors))
        held = self._held.get(key)
        if held is None and self.captured == MOST:
            return function(*host, *tensors)
        if held is None:
            inputs = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
            held = self._held[key] = _Held(inputs, *self._record(lambda: function(*host, *inputs)))
        for own, given in zip(held.inputs, tensors, strict=True):
            own.copy_(given)
        held.recording.replay()
        return _copied(held.result)


def _copied(result: Any) -> Any:
    """The result in memory of its own."""
    if isinstance(result, Tensor):
        return result.clone()
    found = {field.name: getattr(result, field.name) for field in fields(result)}
    return replace(result, **{name: x.clone() for name, x in found.items() if isinstance(x, Tensor)})
