"""Runs functions of tensors as CUDA graphs: one launch repeats the kernels of a whole function.

GraphRunner is the Run (adt_tree.roles) of a target on a GPU. At the first call with inputs of certain shapes
it runs the function as it is and then records it, which runs nothing; from the second call on it replays the
recording. A graph repeats its kernels on the memory it was recorded with. Therefore

- inputs are copied before a replay, except every torch.nn.Buffer, which is read where it lies;
- results are copied, inside the graph, to Buffers outside the scratch that all graphs share; all graphs of a
  function with results of the same shapes have the same Buffers for them, so that a function that reads them
  is recorded once;
- the function may update tensors that it keeps, if it does so in place. Recording runs nothing, so nothing
  has to be restored after it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer


class CudaRecorder:
    """Records what a function does on the device, by torch.cuda.graph. All graphs share one pool of scratch
    memory, and one stream, because cuBLAS keeps a workspace, up to a GiB, for every stream it meets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """The context of the run before a recording, in which libraries allocate their workspaces. It is on
        the stream of the recordings, after all that is queued and before all that follows."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # its device too becomes the current one
            yield
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats run() on the memory it used. RuntimeError if recording fails."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        collecting = gc.isenabled()
        gc.disable()  # the collector may find another graph, whose destruction would spoil the capture
        try:
            # Another thread may use the device meanwhile, which this capture need not forbid.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                run()
        finally:
            torch.cuda.set_stream(current)  # a capture that cannot end leaves its own stream current
            if collecting:
                gc.enable()
        return graph.replay

    def free(self) -> None:
        """Gives back the memory that torch keeps for later tensors."""
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording, the tensors it reads in the order of the inputs, and its results. It keeps the tensors, so
    that no other Buffer has the identity of one of them."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    results: Any


class GraphRunner:
    """Calls functions by replaying recordings. A recording is for one function, the shapes of its tensors and
    the values of its other inputs.

    A recording that runs out of memory is tried once more. If a recording fails, the runner says so on
    stderr, drops all recordings with their memory, and calls everything directly from then on.
    """

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._results: dict[Hashable, Any] = {}  # by function and shapes
        self._failed = False

    @property
    def captured(self) -> int:
        """Number of recordings."""
        return len(self._graphs)

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns function(*inputs). See adt_tree.roles.Run for what the function may do."""
        if self._failed:
            return function(*inputs)
        leaves = leaves_of(inputs)
        key = (function, *map(key_of, leaves))
        graph = self._graphs.get(key)
        if graph is None:
            return self._first_call(key, function, inputs)
        for own, tensor in zip(graph.inputs, filter(torch.is_tensor, leaves), strict=True):
            if own is not tensor:
                own.copy_(tensor)
        graph.replay()
        return graph.results

    def _first_call(self, key: Hashable, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Runs the function, which gives this call's results, and then records it."""
        own = map_tensors(lambda x: x if isinstance(x, Buffer) else contiguous_copy(x), inputs)
        with self._recorder.warm_up():
            values = function(*own)
        results = self._store(function, values)

        def run() -> None:
            for result, value in zip(tensors_in(results), tensors_in(function(*own)), strict=True):
                result.copy_(value)

        try:
            replay = self._record(run)
        except RuntimeError as error:
            self._failed = True
            self._graphs.clear()
            self._results.clear()
            reason = str(error).partition("\n")[0]
            print(f"CUDA graphs are off from here on, a step is slower: {reason}", file=sys.stderr)
        else:
            self._graphs[key] = _Graph(tensors_in(own), replay, results)
        return results

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records run(); RuntimeError if it fails, out of memory if it fails so twice."""
        try:
            return self._recorder.record(run)
        except torch.OutOfMemoryError:
            self._recorder.free()
        return self._recorder.record(run)

    def _store(self, function: Callable[..., Any], values: Any) -> Any:
        """Copies a function's results to the Buffers for results of these shapes."""
        shapes = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves_of(values))
        key = (function, *shapes)
        if key not in self._results:
            self._results[key] = map_tensors(lambda x: Buffer(contiguous_copy(x)), values)
        else:
            for result, value in zip(tensors_in(self._results[key]), tensors_in(values), strict=True):
                result.copy_(value)
        return self._results[key]


def key_of(leaf: Any) -> Hashable:
    """Returns the part of a recording's key that comes from one leaf of the inputs: the identity of a Buffer,
    shape and dtype of another tensor, and any other value itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return id(leaf) if isinstance(leaf, Buffer) else (leaf.shape, leaf.dtype)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns the value with every tensor in it replaced; dataclasses, tuples and lists are entered."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return tuple(map_tensors(function, part) for part in value)
    if names := field_names(value):
        return replace(value, **{name: map_tensors(function, getattr(value, name)) for name in names})
    return value


def leaves_of(value: Any) -> list[Any]:
    """Returns the tensors that map_tensors() would replace, in its order, and all other values among them."""
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves_of(part)]
    if names := field_names(value):
        return [leaf for name in names for leaf in leaves_of(getattr(value, name))]
    return [value]


def field_names(value: Any) -> Iterable[str]:
    """Returns the names of a dataclass' fields; none of anything else."""
    return getattr(type(value), "__dataclass_fields__", ())


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors that map_tensors() would replace, in its order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def contiguous_copy(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy, which shares no memory with the tensor."""
    return tensor.clone(memory_format=torch.contiguous_format)
