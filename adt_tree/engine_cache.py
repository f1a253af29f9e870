"""The engines of one model that no run is using, kept so that a later run need not build one.

Building an engine allocates its caches, and on CUDA its first steps record graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch

from adt_tree.engine import Engine, build
from adt_tree.errors import NoRoom, integer, is_out_of_memory
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.roles import Model, Request

# The room for prompts is a multiple of this, so that prompts of similar lengths share an engine.
PROMPT_STEP = 32


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Two runs with equal keys can use the same engine, one after the other."""

    method: Method
    slots: int  # images in flight
    room: int  # tokens of the longest prompt
    grid: Grid


class EngineCache:
    """Builds engines, and keeps those that were used last. May be used by several threads."""

    def __init__(self, model: Model, max_engines: int) -> None:
        """max_engines: number of idle engines that are kept; a new engine takes the place of one of them."""
        self._model, self._max_engines = model, integer("max_engines", max_engines, least=1)
        self._idle: list[tuple[EngineKey, Engine]] = []  # the one used last comes last
        # The garbage collector may close a stream, and so return its engine, while its thread holds the lock.
        self._lock = RLock()

    @contextmanager
    def lease(self, method: Method, slots: int, prompt: int, grid: Grid | None = None) -> Iterator[Engine]:
        """Lends the caller the engine that take() gives for these arguments, until the block ends.

        After an exception the engine is dropped, except when a generator is closed.
        """
        key, engine = self.take(method, slots, prompt, grid)
        try:
            yield engine
        except GeneratorExit:
            self._give_back(key, engine)
            raise
        self._give_back(key, engine)

    def clear(self) -> None:
        """Drops all idle engines and frees their memory."""
        with self._lock:
            self._idle.clear()
        free_memory(self._model.codebook.device)

    def take(
        self, method: Method, slots: int, prompt: int, grid: Grid | None = None
    ) -> tuple[EngineKey, Engine]:
        """Returns an engine that belongs to the caller from now on, idle or new, and its key.

        slots: images in flight. prompt: tokens of the longest prompt. grid: of the codes; None: the model's.
        The room for prompts is rounded up, or where memory ran out, exact. UserError if the model refuses the
        method, or if memory is too small even without idle engines.
        """
        rounded = EngineKey(method, slots, -(-prompt // PROMPT_STEP) * PROMPT_STEP, grid or self._model.grid)
        exact = replace(rounded, room=prompt)
        with self._lock:
            keys = [key for key, _ in self._idle]
            for key in (rounded, exact):
                if key in keys:
                    return self._idle.pop(keys.index(key))
            self._drop(self._max_engines - 1)
            try:
                return rounded, self._build(rounded)
            except Exception as error:
                if not (isinstance(error, NoRoom) or is_out_of_memory(error)):
                    raise
                self.clear()
            # Outside the handler, because the error holds a part of an engine.
            return exact, self._build(exact)

    def _build(self, key: EngineKey) -> Engine:
        model: Any = self._model  # a dataclass
        if key.grid != model.grid:
            model = replace(model, grid=key.grid)
        return build(model, key.method, key.slots, key.room)

    def _give_back(self, key: EngineKey, engine: Engine) -> None:
        with self._lock:
            self._drop(self._max_engines - 1)
            self._idle.append((key, engine))

    def _drop(self, count: int) -> None:
        """Drops the engines that have been idle longest, until `count` are left."""
        del self._idle[: max(0, len(self._idle) - count)]


def size_of(requests: Sequence[Request], batch_size: int) -> tuple[int, int]:
    """Returns `slots` and `prompt` of EngineCache.take() for requests of which batch_size are in flight."""
    slots = min(integer("batch_size", batch_size, least=1), len(requests))
    return slots, max(request.prompt.length for request in requests)


def free_memory(device: torch.device) -> None:
    """Frees cached memory of deleted tensors, so that tensors of other sizes can use it."""
    gc.collect()  # a target and its graphs, and a module with hooks, may refer to one another
    if device.type == "cuda":
        torch.cuda.empty_cache()
