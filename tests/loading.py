"""Models for tests: what most of them ask of loading, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from models.drafters.new_drafter import new_drafter, own_fields, write_drafter
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


def untrained(name: str, folder: Path, options: LoadOptions = LOAD) -> Path:
    """Write the drafter that training starts from beside a target; returns its folder."""
    model = load(name, str(folder), None, "fp32", "cpu", False, options)
    fields = own_fields(model)
    write_drafter(folder / "drafter", fields, new_drafter(fields, model).state_dict(), model)
    return folder / "drafter"
