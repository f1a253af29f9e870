"""Work captured once a shape as CUDA graphs and replayed: one launch where there were hundreds.

A graph repeats its kernels on the memory it was captured with. So its inputs are copied into buffers right
before it is replayed, and results out right after, for others use the same memory. Rows of a target pass and
bounds on what is committed come in tiers, for one graph to serve many cycles. Everything happens in the order
of one stream; nothing here waits but a capture. For one CUDA device: layers spread over several are not
captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.passes import Host

ROWS = (1, 8, 16, 32, 64)  # of a target pass; above, multiples of the last
REACH = 256  # step of the bounds on committed codes
MOST = 256  # recordings of one target; what is first seen after that runs as it is
WARM_UPS = 1  # runs before a capture: libraries start, tables by shape are made


class Recording(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Run it again on the buffers it was captured with."""


class Recorder(Protocol):
    """Who captures."""

    def __call__(self, run: Callable[[], Any], warm_ups: int) -> tuple[Recording, Any]:
        """The recording of run(), after so many runs to warm up, and what run() returned in it: memory that
        every replay writes anew. Being recorded, run() has no effect yet."""


class CudaRecorder:
    """See Recorder: by torch.cuda.graph. All graphs share one pool of scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any], warm_ups: int) -> tuple[Recording, Any]:
        """See Recorder."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
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

    inputs: list[Tensor]
    recording: Recording
    result: Any

    def replayed(self, given: list[Tensor]) -> Any:
        """The result for other inputs, in memory of its own."""
        for own, other in zip(self.inputs, given, strict=True):
            own.copy_(other)
        self.recording.replay()
        return _filled(self.result, (x.clone() for x in _tensors(self.result)))


class Replays:
    """See adt_tree.passes.Passes: work is captured by its function, what the host knows, and shapes. A pass
    when these are first seen; a change, which cannot be rehearsed, after WARM_UPS runs as it is.
    """

    def __init__(self, record: Recorder, size: int) -> None:
        """size: tokens of an image."""
        self._record, self._size = record, size
        self._held: dict[Hashable, _Held] = {}
        self._changes = Counter[Hashable]()
        self._buffers: dict[Hashable, Tensor] = {}  # of inputs: which of those of a shape and type, and these

    @property
    def captured(self) -> int:
        """Recordings held."""
        return len(self._held)

    @property
    def seen(self) -> int:
        """Grows as long as there is something new: then the next run may still capture."""
        return self.captured + self._changes.total()

    def nodes(self, count: int) -> int:
        """See Passes: the next tier."""
        return next((tier for tier in ROWS if tier >= count), -(-count // ROWS[-1]) * ROWS[-1])

    def reach(self, reach: int) -> int:
        """See Passes: the next multiple of REACH, or the whole image."""
        return min(-(-reach // REACH) * REACH, self._size)

    def __call__(self, function: Callable[..., Any], host: Host, *inputs: Any) -> Any:
        """See Passes."""
        return self._run((function, host, _form(inputs)), inputs, WARM_UPS)

    def change(self, function: Callable[..., Any], host: Host, *inputs: Any) -> Any:
        """See Passes."""
        key = (function, host, _form(inputs))
        if self._changes[key] < WARM_UPS:
            self._changes[key] += 1
            # As in the capture: inputs that lie in one piece may take other kernels than views do.
            return function(*host, *_filled(inputs, (_cloned(x) for x in _tensors(inputs))))
        return self._run(key, inputs, 0)

    def _run(
        self, key: tuple[Callable[..., Any], Host, Hashable], inputs: tuple[Any, ...], warm_ups: int
    ) -> Any:
        """By its recording, made if there is none yet and room for one."""
        (function, host, _), given = key, list(_tensors(inputs))
        held = self._held.get(key)
        if held is None and self.captured == MOST:
            return function(*host, *inputs)
        if held is None:
            buffers = self._placed(given)
            own = _filled(inputs, iter(buffers))
            held = self._held[key] = _Held(buffers, *self._record(lambda: function(*host, *own), warm_ups))
        return held.replayed(given)

    def _placed(self, given: list[Tensor]) -> list[Tensor]:
        """Buffers that hold what is given. All recordings share them."""
        count, buffers = Counter[Hashable](), []
        for x in given:
            key = (x.shape, x.dtype)
            own = self._buffers.setdefault((count[key], key), _cloned(x))
            count[key] += 1
            buffers.append(own.copy_(x))
        return buffers


def _cloned(x: Tensor) -> Tensor:
    """In one piece."""
    return x.clone(memory_format=torch.contiguous_format)


def _parts(value: Any) -> list[Any] | None:
    """What a tuple or dataclass holds; None: it is neither."""
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value) or ():
        yield from _tensors(part)


def _form(value: Any) -> Hashable:
    """All of a value but the numbers in its tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    parts = _parts(value)
    return value if parts is None else (type(value), *map(_form, parts))


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors in the places of its own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_filled(part, tensors) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own = {field.name: _filled(getattr(value, field.name), tensors) for field in fields(value)}
    return replace(value, **own)
