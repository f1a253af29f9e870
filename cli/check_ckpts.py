"""check_ckpts: what is wrong with a model's files, before anything large is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict

from adt_tree.errors import UserError
from cli.options import CheckpointOptions
from cli.parser import declare, positional, shown
from models.registry import SPECS


@declare
class Options(CheckpointOptions):
    """check_ckpts"""

    names: tuple[str, ...] = positional(f"of {', '.join(SPECS)} (default: the one of --model)", "NAME")


def run(options: Options) -> None:
    """Print a line per part and fault, last one JSON document. UserError if anything is at fault."""
    names = options.names or (options.model,)
    for name in names:
        if name not in SPECS:
            raise UserError(f"check_ckpts {name}: there is no such model; choose from {', '.join(SPECS)}")
    given = [word for word in (shown(options, "model_path"), shown(options, "drafter_path")) if word]
    if given and len(names) > 1:
        raise UserError(f"{given[0]}: it is of one model; check one NAME at a time")
    from cli.loading import load_options
    from models.inspection import inspect

    found = {}
    for name in names:
        parts = inspect(name, load_options(options))
        found[name] = [asdict(part) for part in parts]
        for part in parts:
            state = "FAULTY" if part.faults else part.note or "ok"
            print(f"  {name:<12} {part.name:<8} {state:<28} {part.place}")
            for fault in part.faults:
                print(f"      {fault}")
    faults = sum(len(part["faults"]) for parts in found.values() for part in parts)
    print(json.dumps({"ok": not faults, "faults": faults, "models": found}))
    if faults:
        raise UserError(
            f"check_ckpts {' '.join(names)}: faults, {faults} in all, stand above; fetch what is named anew"
        )
