"""A recorder that works without CUDA: it runs the operators of a recorded function again, on the same memory.

Like a CUDA graph, a recording has no effect while it is made, runs no Python when it is replayed, and writes
its results to the same memory each time. All recordings share their scratch memory, so the results of one are
overwritten as soon as another runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.graphs import tensors_in

FILLER = 77  # written over the contents of scratch memory


class Saved:
    """Copies of the memory that operators change, made before they change it."""

    def __init__(self) -> None:
        self._content: dict[int, tuple[Tensor, Tensor]] = {}  # the memory, and a copy of it

    def save(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Saves the memory that an operator is about to change."""
        for x in written(func, args, kwargs):
            if _memory(x) not in self._content:
                whole = x.new_empty(0).set_(x.untyped_storage())
                self._content[_memory(x)] = whole, whole.clone()

    def exchange(self) -> None:
        """Swaps the saved contents and the contents of the memory."""
        for key, (memory, content) in self._content.items():
            self._content[key] = memory, memory.clone()
            memory.copy_(content)


class Tape:
    """A recording: the calls of operators with their outputs."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._calls: list[tuple[Any, tuple, dict[str, Any], list[Tensor]]] = []

    def note(self, func: Any, args: tuple, kwargs: dict[str, Any], answer: Any) -> None:
        """Notes an operator that has run, unless its output is only a view. Raises RuntimeError if the host
        read a number of the device."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number was read in a capture")
        outputs = new_tensors(args, kwargs, answer)
        if outputs or func._schema.is_mutable:
            self._calls.append((func, args, kwargs, outputs))

    def replay(self) -> None:
        """Runs all operators again."""
        self._machine.switch_to(self)
        for func, args, kwargs, outputs in self._calls:
            for old, new in zip(outputs, new_tensors(args, kwargs, func(*args, **kwargs)), strict=True):
                old.copy_(new)

    def spoil(self) -> None:
        """Overwrites the outputs, as another recording would."""
        for _, _, _, outputs in self._calls:
            for x in outputs:
                x.fill_(FILLER)


class Machine:
    """Takes the place of models.graphs.CudaRecorder: it records tapes."""

    def __init__(self, fail_at: int = 0, error: type[RuntimeError] = RuntimeError) -> None:
        """Makes a recorder whose recording number `fail_at`, counted from 1, fails with that error."""
        self._last: Tape | None = None
        self._fail_at, self._error, self.recordings, self.freed = fail_at, error, 0, 0
        self._warm_up = Saved()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Saves the memory that the first run changes, so that the recording starts from the same
        contents."""
        self._warm_up = Saved()
        with Operators(before=self._warm_up.save):
            yield

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records a tape. Raises RuntimeError midway if this recording is to fail."""
        self.recordings += 1
        tape, recording = Tape(self), Saved()
        self._warm_up.exchange()
        self.switch_to(tape)
        try:
            with Operators(tape.note, recording.save):
                run()
                if self.recordings == self._fail_at:
                    raise self._error("out of graphs")
        finally:
            recording.exchange()
            self._warm_up.exchange()
            tape.spoil()
        return tape.replay

    def free(self) -> None:
        """Counts how often memory was asked back."""
        self.freed += 1

    def switch_to(self, tape: Tape) -> None:
        """Spoils the tape that ran before, because another one runs now."""
        if self._last is not None and self._last is not tape:
            self._last.spoil()
        self._last = tape


class Operators(TorchDispatchMode):
    """A context that calls a function with every operator that reaches the kernels."""

    def __init__(
        self,
        note: Callable[[Any, tuple, dict[str, Any], Any], None] = lambda *seen: None,
        before: Callable[[Any, tuple, dict[str, Any]], None] = lambda *seen: None,
    ) -> None:
        """Takes a function to call after every operator (`note`) and one to call before it (`before`)."""
        super().__init__()
        self._note, self._before = note, before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        with self:  # a composite operator dispatches its parts to this mode
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        self._before(func, args, options)
        answer = func(*args, **options)
        self._note(func, args, options, answer)
        return answer


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors among an operator's arguments that it changes."""
    arguments = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs
    names = [x.name for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
    return tensors_in([arguments[name] for name in names if name in arguments])


def new_tensors(args: tuple, kwargs: dict[str, Any], answer: Any) -> list[Tensor]:
    """Returns the tensors in an operator's answer that have new memory, which no argument shares."""
    shared = {_memory(x) for x in tensors_in((args, *kwargs.values()))}
    return [x for x in tensors_in(answer) if _memory(x) not in shared]


def _memory(x: Tensor) -> int:
    """Returns a key that is equal for all views of one memory."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)
