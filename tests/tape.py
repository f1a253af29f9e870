"""A recorder without CUDA: the operators of a captured function, run again on the memory they ran on.

As in a CUDA graph, no Python runs in a replay, what a capture made is written anew in its place, and other
recordings use the same scratch: what one made is spoilt as soon as another runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SPOILT = 77  # in the place of any number


class Tape:
    """A recording. Operators run as they are recorded: the first replay has nothing to do."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._fresh = machine, True
        self._done: list[tuple[Any, tuple, dict[str, Any], list[Tensor]]] = []

    def note(self, func: Any, args: tuple, kwargs: dict[str, Any], answer: Any) -> None:
        """An operator that has run, unless all it did was to look at memory that was there.

        Refuses to read a number; tests.reads sees what else would wait."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number was read in a capture")
        own = made(args, kwargs, answer)
        if own or func._schema.is_mutable:
            self._done.append((func, args, kwargs, own))

    def replay(self) -> None:
        """Run the tape again."""
        with self._machine.running(self):
            for func, args, kwargs, own in () if self._fresh else self._done:
                for old, new in zip(own, made(args, kwargs, func(*args, **kwargs)), strict=True):
                    old.copy_(new)
            self._fresh = False

    def spoil(self) -> None:
        """Another recording uses the scratch."""
        for _, _, _, own in self._done:
            for x in own:
                x.fill_(SPOILT)


class Machine:
    """See models.graphs.Recorder."""

    def __init__(self) -> None:
        self._last: Tape | None = None
        self.busy = False  # with a recording

    def __call__(self, run: Callable[[], Any], warm_ups: int) -> tuple[Callable[[], None], Any]:
        """Record a tape."""
        for _ in range(warm_ups):
            run()
        tape = Tape(self)
        with self.running(tape), Operators(tape.note):
            return tape.replay, run()

    @contextmanager
    def running(self, tape: Tape) -> Iterator[None]:
        """While operators of that recording run; the scratch is its own."""
        self.busy = True
        if self._last is not None and self._last is not tape:
            self._last.spoil()
        self._last = tape
        try:
            yield
        finally:
            self.busy = False


class Operators(TorchDispatchMode):
    """Notes what has reached the kernels."""

    def __init__(self, note: Callable[[Any, tuple, dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        with self:  # an operator made of others is taken apart
            parts = func.decompose(*args, **given)
        if parts is not NotImplemented:
            return parts
        answer = func(*args, **given)
        self._note(func, args, given, answer)
        return answer


class Launches(Operators):
    """Counts the operators that write memory outside of a machine's replays: kernels, on CUDA. To look at
    memory, or to ask for some, is none."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(self._count)
        self.count, self._machine = 0, machine

    def _count(self, func: Any, args: tuple, kwargs: dict[str, Any], answer: Any) -> None:
        asks = "empty" in func.overloadpacket.__name__
        writes = func._schema.is_mutable or (not asks and bool(made(args, kwargs, answer)))
        self.count += writes and not self._machine.busy


def made(args: tuple, kwargs: dict[str, Any], answer: Any) -> list[Tensor]:
    """Tensors of an operator's answer that are not views of what it was given."""
    given = {_memory(x) for x in _tensors((args, kwargs))}
    return [x for x in _tensors(answer) if _memory(x) not in given]


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _memory(x: Tensor) -> int:
    """Equal for views of one another."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)
