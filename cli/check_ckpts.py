"""check_ckpts: checks the files of models and names every fault before anything large is loaded."""

from __future__ import annotations

from dataclasses import asdict, replace

from adt_tree.errors import UserError
from cli.options import CheckpointOptions, check_model, refuse_unread
from cli.parser import as_written, declare, positional
from models.checkpoint.files import json_text
from models.registry import SPECS


@declare
class Options(CheckpointOptions):
    """check_ckpts"""

    names: tuple[str, ...] = positional(
        f"models, among {', '.join(SPECS)} (default: that of --model)", "NAME"
    )


def run(options: Options) -> None:
    """Prints a line for each part of each model and for each fault, and at the end one JSON document. Raises
    UserError if there are faults."""
    if options.names:
        refuse_unread(options, ("model",), f"{' '.join(options.names)} is checked instead")
    names = options.names or (options.model,)
    paths = [path for name in ("model_path", "drafter_path") if (path := as_written(options, name))]
    if paths and len(names) > 1:
        raise UserError(f"{paths[0]}: it belongs to one model; check one NAME at a time")
    for name in names:
        check_model(replace(options, model=name))
    from cli.inspection import inspect
    from cli.model_from_options import load_options

    models = {}
    for name in names:
        parts = inspect(name, load_options(options))
        models[name] = [asdict(part) for part in parts]
        for part in parts:
            state = "FAULTY" if part.faults else part.note or "ok"
            print(f"  {name:<12} {part.name:<8} {state:<28} {part.place}")
            for fault in part.faults:
                print(f"      {fault}")
    faults = sum(len(part["faults"]) for parts in models.values() for part in parts)
    print(json_text({"ok": not faults, "faults": faults, "models": models}))
    if faults:
        raise UserError(
            f"check_ckpts {' '.join(names)}: {faults} faults, printed above; fetch those files again"
        )
