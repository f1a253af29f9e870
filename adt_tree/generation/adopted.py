"""The transformers models that `generate` has taken over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from models.image_tokens import ImageTokens
from models.layouts.adopted import ADOPTION, image_tokens

Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A transformers model that this engine has taken over."""

    pipe: Pipeline
    tokens: ImageTokens
    stamp: Stamp  # of the weights when they were taken over

    @classmethod
    def of(cls, model: Any) -> Adopted:
        """Takes a model over. A second call returns the same object, unless the weights have changed."""
        with ADOPTION:  # two threads must not both take it over
            adopted, now = ADOPTED.get(model), stamp(model)
            if adopted is None or adopted.stamp != now:
                ADOPTED.pop(model, None)
                tokens, pipe = image_tokens(model), Pipeline.from_transformers(model, None)
                adopted = ADOPTED[model] = cls(pipe, tokens, stamp(model))  # adoption itself moves parameters
        return adopted

    def method(self, name: str | Method | None, sampling: Sampling) -> Method:
        """Returns a method with this sampling. UserError for a method that needs a drafter network."""
        if isinstance(name, Method):
            return self.pipe.method(replace(name, sampling=sampling))
        return self.pipe.method(name, sampling=sampling)


ADOPTED: WeakKeyDictionary[Any, Adopted] = WeakKeyDictionary()  # frees a model without other references


def stamp(model: Any) -> Stamp:
    """Returns the address and version of every parameter. They change if it is trained, moved or replaced."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    )
