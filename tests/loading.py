"""Models for tests: what most of them ask of loading, in one line."""

from __future__ import annotations

from dataclasses import replace

from models.loading import load as load_model
from models.model import Model
from models.spec import LoadOptions

LOAD = LoadOptions()


def load(
    model: str,
    model_path: str | None,
    drafter_path: str | None,
    precision: str,
    device: str,
    need_drafter: bool,
    options: LoadOptions = LOAD,
) -> Model:
    """The model, its drafter reading tokens as published unless the options say otherwise."""
    given = replace(
        options,
        model_path=model_path,
        drafter_path=drafter_path,
        precision=precision,
        device=device,
        need_drafter=need_drafter,
        token_shift=options.token_shift or "published",
    )
    return load_model(model, given)
