"""check_ckpts: checks the files of models and names every fault before anything large is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from adt_tree.errors import UserError
from cli.options import CheckpointOptions, check_model, refuse_unread
from cli.parser import as_written, declare, option, positional
from models.family import LoadOptions
from models.registry import SPECS


@declare
class Options(CheckpointOptions):
    """check_ckpts"""

    names: tuple[str, ...] = positional(
        f"models, among {', '.join(SPECS)} (default: that of --model)", "NAME"
    )
    alignment: bool = option(
        "also load the models with their drafters, and measure in which --drafter_alignment a drafter "
        "predicts its target better: the mean rate at which it is accepted in the first row of an image",
        False,
    )


def run(options: Options) -> None:
    """Prints a line for each part of each model and for each fault, and at the end one JSON document. With
    --alignment, models without faults are loaded and measured.

    Raises UserError if there are faults.
    """
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

    models, rates = {}, {}
    for name in names:
        parts = inspect(name, load_options(options))
        models[name] = [asdict(part) for part in parts]
        for part in parts:
            state = "FAULTY" if part.faults else part.note or "ok"
            print(f"  {name:<12} {part.name:<8} {state:<28} {part.place}")
            for fault in part.faults:
                print(f"      {fault}")
        if options.alignment and not any(part.faults for part in parts):
            rates[name] = measure_alignment(name, load_options(options, need_drafter=True))
    faults = sum(len(part["faults"]) for parts in models.values() for part in parts)
    print(json.dumps({"ok": not faults, "faults": faults, "models": models, "acceptance_rates": rates}))
    if faults:
        raise UserError(
            f"check_ckpts {' '.join(names)}: {faults} faults, printed above; fetch those files again"
        )


def measure_alignment(name: str, options: LoadOptions) -> dict[str, float]:
    """Loads a model with its drafter. Prints and returns the drafter's acceptance rate in each alignment."""
    from cli.acceptance_rates import acceptance_rates
    from models.loading import load

    rates = acceptance_rates(load(name, replace(options, drafter_alignment="published")))
    listed = ", ".join(f"{alignment} {rate:.3f}" for alignment, rate in rates.items())
    better = max(rates, key=lambda alignment: rates[alignment])  # the first where they tie
    print(f"  {name:<12} acceptance rates: {listed}; give --drafter_alignment {better}")
    return rates
