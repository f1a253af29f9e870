"""The transformers models that `generate` has taken over, and the engines that decode with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from adt_tree.engine import Engine, build
from adt_tree.generation.call_settings import refuse
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.image_tokens import ImageTokens
from models.layouts.adopted import image_tokens

PROMPT_STEP = 32  # the room for prompts is a multiple of this, so that similar lengths share an engine
MOST_ENGINES = 2  # engines per model: each holds a cache of keys and values


@dataclass(slots=True)
class Adopted:
    """A transformers model that this engine has taken over, and the engines that decode with it."""

    pipe: Pipeline
    tokens: ImageTokens
    stamp: tuple[tuple[int, int], ...]  # stamp() of the model when it was taken over
    engines: dict[tuple[Grid, int, Method, int], Engine] = field(default_factory=dict)  # newest last
    lock: Any = field(default_factory=Lock)  # an engine decodes one batch at a time

    @classmethod
    def of(cls, model: Any) -> Adopted:
        """Takes a model over. A second call returns the same object, unless the weights have changed."""
        adopted = ADOPTED.get(model)
        if adopted is None or adopted.stamp != stamp(model):
            ADOPTED.pop(model, None)
            tokens, pipe = image_tokens(model), Pipeline.from_transformers(model, None)
            adopted = ADOPTED[model] = cls(pipe, tokens, stamp(model))
        return adopted

    def decode(
        self, requests: Sequence[Request], grid: Grid, sampling: Sampling, method: str | Method | None
    ) -> list[list[int]]:
        """Returns the codes of every request's image."""
        if isinstance(method, Method):
            chosen = replace(method, sampling=sampling)
        else:
            chosen = self.pipe.method(method, sampling=sampling)
        if chosen.name not in self.pipe.methods:
            refuse(
                f"method {chosen.name!r}: it needs a drafter network; choose {', '.join(self.pipe.methods)}"
            )
        longest = max(request.prompt.length for request in requests)
        room = -(-longest // PROMPT_STEP) * PROMPT_STEP
        engine = self.engine(grid, len(requests), chosen, room)
        by_name = {image.name: image.codes for image in engine.decode(requests)}
        return [by_name[request.name] for request in requests]

    def engine(self, grid: Grid, slots: int, method: Method, room: int) -> Engine:
        """Returns an engine for `slots` images of that grid and prompts of up to `room` tokens."""
        key = grid, slots, method, room
        engine = self.engines.pop(key, None)
        if engine is None:
            while len(self.engines) >= MOST_ENGINES:
                del self.engines[next(iter(self.engines))]
            engine = build(replace(self.pipe.model, grid=grid), method, slots, room)
        self.engines[key] = engine
        return engine


ADOPTED: WeakKeyDictionary[Any, Adopted] = WeakKeyDictionary()  # a model that nobody else holds is freed


def stamp(model: Any) -> tuple[tuple[int, int], ...]:
    """Returns the address and version of every parameter. They change if it is trained, moved or replaced."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    )
