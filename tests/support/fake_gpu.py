"""A fake GPU: torch's meta device, whose tensors have shapes but no numbers. It counts the launches of every
operator, the memory of its results and the times that the host waits.

It does not see which kernels run, nor streams, nor real captures.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adt_tree.batch
import adt_tree.tree
from adt_tree.policy import TreeShape
from models.checkpoint.stored_module import on_meta
from models.graphs import tensors_in

GPU = torch.device("meta")
aten = torch.ops.aten

# Operators that CUDA runs by one special kernel, so they must not be decomposed.
WHOLE = {
    aten.scaled_dot_product_attention.default, aten.rms_norm.default, aten.linear.default,
    aten.layer_norm.default, aten.one_hot.default,
}  # fmt: skip
# Number of kernels that an operator launches; every other operator launches one.
KERNELS = {
    "masked_fill": 2, "scatter": 2, "sort": 3, "topk": 3, "scatter_reduce": 3, "eye": 2,
    "constant_pad_nd": 2, "one_hot": 2, "scatter_add": 2,
}  # fmt: skip
# Operators that launch nothing, although torch does not mark them as views.
NO_KERNEL = {"detach", "alias", "lift_fresh", "reshape", "device", "_unsafe_view", "scalar_tensor"}
READS = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default,
}  # fmt: skip
WAITING = {"multinomial", "randperm", "histc"}  # the others that wait for their values do not run here
SUBSCRIPTS = {"__getitem__", "__setitem__"}
COPIES = {"_to_copy", "copy_", "copy"}
PAGEABLE = "copy from pageable memory"
ATTENTION = aten.scaled_dot_product_attention.default
ALIGNED = 8  # CUDA's fused attention needs head sizes and strides of masks that are multiples of this
BLOCK = 512  # CUDA's allocator rounds sizes up to a multiple of this number of bytes
IN_PLACE = object()  # takes the place of a result's layout if the operator returns its first argument


class Layout(NamedTuple):
    """Everything about a tensor except its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def layouts_of(value: Any) -> Any:
    """Returns the value with a Layout in place of every tensor, so that it is hashable."""
    if isinstance(value, Tensor):
        return Layout(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(layouts_of, value))
    return type(value), value  # 1, 1.0 and True are equal, but not the same argument


def results_of(layouts: Any, args: tuple) -> Any:
    """Returns new tensors of these layouts, or the first argument for IN_PLACE."""
    if layouts is IN_PLACE:
        return args[0]
    if isinstance(layouts, Layout):
        return torch.empty_strided(*layouts[:2], dtype=layouts.dtype, device=layouts.device)
    return tuple(results_of(part, args) for part in layouts)


def memory_of(tensor: Tensor) -> int:
    """Returns a key that is equal for all tensors in the same memory."""
    return tensor.untyped_storage()._cdata


class Memory:
    """The bytes in use on the device, and their maximum so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._pool = 0  # bytes of scratch that all recordings share, and that nothing else may use
        self._live: dict[int, int] = {}  # bytes by storage

    def note(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor until it is freed."""
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if key in self._live:
            return
        self._live[key] = size
        self._grow(size)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)

    def _grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts allocations in the block as part of the pool of recordings, which grows to the size of the
        largest recording."""
        before, peak = self.now, self.peak
        self.peak = self.now
        try:
            yield
        finally:
            needed, self.peak = self.peak - before, peak
            self._grow(max(0, needed - self._pool))
            self._pool = max(self._pool, needed)


class Device(TorchDispatchMode):
    """Counts the kernels and copies that reach the device, and notes faults, which would be slow or fail on a
    GPU. Launches inside a recording are not counted; a replay counts as one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []  # the operator of every launch
        self.reads = 0  # times that the host waited for numbers
        self.faults = set[str]()
        self.memory = Memory()
        self._silent = False
        self._single = set(WHOLE)  # operators that are not made of others
        self._known: dict[Hashable, Any] = {}  # layouts of results

    @property
    def launches(self) -> int:
        """Number of launches."""
        return len(self.kernels)

    def forget(self) -> None:
        """Resets all counts except memory."""
        self.kernels, self.reads = [], 0
        self.faults.clear()

    def note(self, name: str = "copy or replay", kernels: int = 1) -> None:
        """Counts launches of an operator, unless they are silent."""
        if not self._silent:
            self.kernels += [name] * kernels

    def read(self) -> None:
        """Counts a launch for which the host waits."""
        self.reads += 1
        self.note()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Does not count the launches in the block: a device would not make them, or they were counted
        already."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = tensors_in((args, *given.values()))
        if name not in COPIES and len({x.device for x in tensors if x.dim()}) > 1:
            raise RuntimeError(f"{name}: all tensors must be on the same device")
        if func in READS:
            self.read()
            return args[0].dtype.is_floating_point and 0.0  # 0.0, or False, which is the integer 0
        if func not in self._single and func.namespace == "aten":
            with self:  # a composite operator dispatches its parts to this mode
                parts = func.decompose(*args, **given)
            if parts is not NotImplemented:
                return parts
            self._single.add(func)
        answer = self._answer(func, args, given)
        if name in WAITING:
            self.faults.add(f"{name} waits")
        if func is ATTENTION:
            self.faults.update(attention_faults(*args, **given))
        if not (func.is_view or "empty" in name or name in NO_KERNEL):
            self.note(name, KERNELS.get(name, 1))
        if not func.is_view:
            self._note_results(name, args, answer)
        return answer

    def _answer(self, func: Any, args: tuple, given: dict[str, Any]) -> Any:
        """Returns func(*args, **given). On this device results have nothing but a layout, which torch takes
        long to compute, so the layouts are stored for later calls with arguments of the same layouts."""
        key = (func, layouts_of(args), layouts_of(tuple(given.items())))
        if key in self._known:
            return results_of(self._known[key], args)
        answer = func(*args, **given)
        results, used = tree_leaves(answer), set(map(memory_of, tensors_in((args, *given.values()))))
        if all(isinstance(x, Tensor) and x.device == GPU for x in results):
            if args and answer is args[0]:
                self._known[key] = IN_PLACE
            elif used.isdisjoint(map(memory_of, results)):
                self._known[key] = layouts_of(answer)
        return answer

    def _note_results(self, name: str, args: tuple, answer: Any) -> None:
        """Counts the memory of an operator's results. Notes a fault for a result on another device and for a
        copy from pageable memory."""
        for tensor in tree_leaves(answer):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.device == GPU:
                self.memory.note(tensor)
            elif name != "lift_fresh":
                self.faults.add(f"{name} on {tensor.device}")
            if name in COPIES and any(isinstance(x, Tensor) and x.device.type == "cpu" for x in args):
                self.faults.add(PAGEABLE)


class Subscripts(TorchFunctionMode):
    """Notes subscripts that copy from pageable memory: those with a list, and a number that is set in a
    tensor without dimensions. CUDA fills larger tensors with a number."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer, name = func(*args, **kwargs or {}), getattr(func, "__name__", "")
        if name in SUBSCRIPTS and args[0].device == GPU:
            parts = args[1] if isinstance(args[1], tuple) else args[1:2]
            number = name == "__setitem__" and not isinstance(args[2], Tensor)
            if any(isinstance(part, list) for part in parts) or (number and not args[0][args[1]].dim()):
                self._device.faults.add(f"{name} from pageable memory")
        return answer


def attention_faults(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **more: Any
) -> list[str]:
    """Returns the reasons for which a call of scaled_dot_product_attention would not use CUDA's fused
    kernels."""
    faults = []
    if more.get("enable_gqa") or query.shape[1] != key.shape[1]:
        faults.append("grouped heads at SDPA")
    if query.shape[-1] % ALIGNED:
        faults.append("head size at SDPA")
    if attn_mask is not None:
        *strides, last = attn_mask.stride()
        used = [n for n, size in zip(strides, attn_mask.shape[:-1], strict=True) if size > 1]
        if last != 1 or any(n % ALIGNED for n in used):
            faults.append("mask strides at SDPA")
    return faults


class FakeRecorder:
    """Takes the place of models.graphs.CudaRecorder: a recording runs the function once, a replay
    runs nothing and is one launch."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def warm_up(self) -> nullcontext[None]:
        """Returns a context that does nothing, because the first run of a function is launched operator by
        operator."""
        return nullcontext()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs a function once without counting its launches. Returns a replay, which counts one."""
        with self._device.silent(), self._device.memory.recording():
            run()
        return self._device.note


def shape_of(values: object) -> tuple[int, ...]:
    """Returns the shape of nested lists."""
    if not isinstance(values, list | tuple):
        return ()
    return (len(values), *(shape_of(values[0]) if values else ()))


class Script:
    """Makes up the numbers that the host reads, because this device has none. The steps of the first image
    accept 1, 2, 3, 0, 1, ... drafts, at most one per level of the tree, so that adaptive trees grow and
    shrink."""

    def __init__(self) -> None:
        self.steps, self.shapes = 0, list[TreeShape]()

    def table(self, rows: int, columns: int) -> list[list[float]]:
        """Returns the next table of adt_tree.batch.outcomes: a row per image with the number of committed
        codes, the number of drafted nodes, codes and probabilities. A table of two columns is that of
        decode.first_codes."""
        if columns == 2:
            return [[0, 0]] * rows
        self.steps += 1
        outcomes = []
        for row in range(rows):
            depth = self.shapes[row].depth if self.shapes else 0  # none are known of rows of an image
            accepted = min((self.steps + row) % 4, depth, (columns - 2) // 2 - 1)
            outcomes.append([accepted + 1.0, 1.0] + [0.0] * (columns - 2))
        return outcomes


@contextmanager
def fake_gpu() -> Iterator[tuple[Device, Script]]:
    """Runs the block with the fake device in the place of a GPU. Yields the device and its script."""
    gpu, script, copied = Device(), Script(), adt_tree.tree.to_device

    def to_device(values: Any, device: torch.device) -> Tensor:
        gpu.note()
        with gpu.silent():
            return torch.zeros(shape_of(values), dtype=torch.int64, device=device)

    make = torch.tensor

    def tensor(values: Any, dtype: torch.dtype | None = None, device: Any = "cpu") -> Tensor:
        """Copies numbers from pageable memory to the device, where they are zeros."""
        if torch.device(device).type == "cpu":
            return make(values, dtype=dtype, device=device)
        gpu.note()
        gpu.faults.add(PAGEABLE)
        with gpu.silent():
            return torch.zeros(shape_of(values), dtype=dtype or make(values).dtype, device=device)

    def tolist(table: Tensor) -> list[list[float]]:
        gpu.read()
        return script.table(*table.shape)

    advance = adt_tree.batch.BatchSlots.advance

    def watched(slots: Any, tree: Any, verdict: Any, table: Any, shapes: list[TreeShape]) -> Any:
        script.shapes = shapes
        return advance(slots, tree, verdict, table, shapes)

    _device_constructors()  # torch keeps this list when it is first made, and `tensor` must not be in it
    with ExitStack() as stack:
        for module in [m for m in sys.modules.values() if getattr(m, "to_device", None) is copied]:
            stack.enter_context(patch.object(module, "to_device", to_device))
        stack.enter_context(patch.object(Tensor, "tolist", tolist))
        stack.enter_context(patch.object(adt_tree.batch.BatchSlots, "advance", watched))
        stack.enter_context(patch("models.model.CudaRecorder", lambda device: FakeRecorder(gpu)))
        stack.enter_context(patch("torch.tensor", tensor))
        stack.enter_context(Subscripts(gpu))
        yield stack.enter_context(gpu), script


def unfilled(make: Callable[[], Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the result of make(), built on the fake device."""
    return on_meta(make).to(dtype).eval().requires_grad_(False)
