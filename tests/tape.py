"""A recorder without CUDA: the operators of a recorded function, run again on the memory they ran on.

As with a CUDA graph, recording changes nothing, no Python runs in a replay, what a recording made is written
anew in its place, and other recordings use the same scratch: what one made is spoilt as soon as another runs.
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


class Saved:
    """The memory that operators changed, as it was before."""

    def __init__(self) -> None:
        self._content: dict[int, tuple[Tensor, Tensor]] = {}  # the memory, and a copy of it

    def save(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keeps what an operator is about to change."""
        for x in written(func, args, kwargs):
            if _memory(x) not in self._content:
                whole = x.new_empty(0).set_(x.untyped_storage())
                self._content[_memory(x)] = whole, whole.clone()

    def exchange(self) -> None:
        """Puts back what was kept, and keeps what was there."""
        for key, (memory, content) in self._content.items():
            self._content[key] = memory, memory.clone()
            memory.copy_(content)


class Tape:
    """A recording."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
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
            for func, args, kwargs, own in self._done:
                for old, new in zip(own, made(args, kwargs, func(*args, **kwargs)), strict=True):
                    old.copy_(new)

    def spoil(self) -> None:
        """Another recording uses the scratch."""
        for _, _, _, own in self._done:
            for x in own:
                x.fill_(SPOILT)


class Machine:
    """A models.graphs.Recorder."""

    def __init__(self, fail_at: int = 0) -> None:
        """fail_at: the recording that fails, counted from 1."""
        self._last: Tape | None = None
        self._fail_at, self.recordings = fail_at, 0
        self._warm_up = Saved()
        self.busy = False  # with a recording

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Keeps what the run changes: the recording runs on what the run found."""
        self._warm_up = Saved()
        with Operators(before=self._warm_up.save):
            yield

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records a tape. RuntimeError, midway, if this one is to fail."""
        self.recordings += 1
        tape, recording = Tape(self), Saved()
        self._warm_up.exchange()
        with self.running(tape):
            try:
                with Operators(tape.note, recording.save):
                    run()
                    if self.recordings == self._fail_at:
                        raise RuntimeError("out of graphs")
            finally:
                recording.exchange()
                self._warm_up.exchange()
                tape.spoil()
        return tape.replay

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

    def __init__(
        self,
        note: Callable[[Any, tuple, dict[str, Any], Any], None] = lambda *seen: None,
        before: Callable[[Any, tuple, dict[str, Any]], None] = lambda *seen: None,
    ) -> None:
        """note: sees an operator that has run; before: one that is about to."""
        super().__init__()
        self._note, self._before = note, before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        with self:  # an operator made of others is taken apart
            parts = func.decompose(*args, **given)
        if parts is not NotImplemented:
            return parts
        self._before(func, args, given)
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


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors of an operator's arguments that it changes."""
    given = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs
    names = [x.name for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
    return list(_tensors([given[name] for name in names if name in given]))


def made(args: tuple, kwargs: dict[str, Any], answer: Any) -> list[Tensor]:
    """Tensors of an operator's answer that are not views of what it was given."""
    given = {_memory(x) for x in _tensors((args, kwargs))}
    return [x for x in _tensors(answer) if _memory(x) not in given]


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _memory(x: Tensor) -> int:
    """Equal for views of one another."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)
