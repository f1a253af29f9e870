"""check_ckpts: checks the files of models and names every fault before anything large is loaded."""

from __future__ import annotations

from dataclasses import asdict

from adt_tree.errors import UserError
from cli.flags import with_flags
from cli.options import DrafterOptions, FileOptions
from models.checkpoint.files import json_text
from models.registry import SPECS
from storage.command_line import CommandOptions, declare, positional, refuse


@declare("models")
class Options(FileOptions, DrafterOptions, CommandOptions):
    """Which models are checked, and where their files are."""

    names: tuple[str, ...] = positional(
        "models",
        "NAME",
        ("emoji",),
        choices=tuple(SPECS),
        reads={name: spec.options for name, spec in SPECS.items()},
    )


def run(options: Options) -> None:
    """Prints a line for each part of each model and for each fault, and at the end one JSON document. Raises
    UserError if there are faults."""
    if len(options.names) > 1:
        for name in (*FileOptions.__annotations__, *DrafterOptions.__annotations__):
            refuse(options, name, "it belongs to one model; check one NAME at a time")
    from cli.inspection import inspect
    from cli.model_from_options import load_options

    models = {}
    for name in options.names:
        parts = inspect(name, load_options(options))
        models[name] = [asdict(part) for part in parts]
        for part in parts:
            state = "FAULTY" if part.faults else part.note or "ok"
            print(f"  {name:<12} {part.name:<8} {state:<28} {part.place}")
            for fault in part.faults:
                print(f"      {with_flags(fault, Options)}")
    faults = sum(len(part["faults"]) for parts in models.values() for part in parts)
    print(json_text({"ok": not faults, "faults": faults, "models": models}))
    if faults:
        raise UserError(
            f"check_ckpts {' '.join(options.names)}: {faults} faults, printed above; fetch those files again"
        )
