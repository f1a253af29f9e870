"""check_ckpts: what is wrong with a model's files, before anything large is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from eval.checkpoint_options import add_checkpoint_arguments
from eval.errors import UserError
from eval.families import MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of check_ckpts."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"models to check: {', '.join(MODELS)} (default: the one of --model)",
    )
    add_checkpoint_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> None:
    """Print a line a part and fault, last one JSON document. UserError if anything is at fault."""
    names = args.names or [args.model]
    for name in names:
        if name not in MODELS:
            raise UserError(f"check_ckpts {name}: there is no such model; choose from {', '.join(MODELS)}")
    given = [option for option in ("model_path", "drafter_path") if getattr(args, option) is not None]
    if given and len(names) > 1:
        raise UserError(
            f"--{given[0]} {getattr(args, given[0])}: it is of one model; check one NAME at a time"
        )
    from eval.session import extras_of
    from models.inspection import inspect

    found = {}
    for name in names:
        parts = inspect(name, args.model_path, args.drafter_path, extras_of(args))
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
