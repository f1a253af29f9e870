"""What the stages share: the command line, atomic checkpoints, the choice of device.

A stage is a module with a class Options, a function run(options), and a command line of these options:
`python -m recipes.emoji.tokenizer --steps 8000`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from adt_tree.errors import UserError
from models.checkpoint.files import replacing
from models.family import DEVICES
from models.loading import pick_device
from storage.command_line import CommandOptions, declare, option

Kind = TypeVar("Kind", bound="StageOptions")


@declare("every stage")
class StageOptions(CommandOptions):
    """Options of every stage."""

    work_dir: str = option("folder of the data and of everything the stages write", "data/emoji")


@declare("training")
class TrainedOptions(StageOptions):
    """Options of the stages that train."""

    restart: bool = option("discard the results of an earlier run of this stage", False)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    threads: int = option("torch threads on the CPU", 2, least=1)
    seed: int = option("seed of the initial weights", 0)
    save_steps: int = option("steps between saved states", 250, least=1)
    batch_size: int = option("pictures per step", 16, least=1)


def main(kind: type[Kind], run: Callable[[Kind], None], text: str) -> None:
    """Runs a stage from the command line. A UserError ends it with one line and status 2."""
    try:
        run(kind.parse(sys.argv[1:], f"python -m recipes.emoji.{Path(sys.argv[0]).stem}", text))
    except UserError as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def save_checkpoint(path: Path, payload: dict) -> None:
    """Writes a checkpoint completely, or leaves the old one. Raises OSError, which names the path."""
    with replacing(path) as part, part.open("wb") as stream:
        torch.save(payload, stream)


def saved_state(work: Path, stage: str) -> dict:
    """Returns the state that a stage has saved, on the CPU. Raises UserError if there is none."""
    path = work / f"{stage}.pt"
    if not path.exists():
        raise UserError(f"{work} has no {path.name}: run recipes.emoji.{stage} with this --work_dir")
    return torch.load(path, map_location="cpu", weights_only=True)


def earlier_state(options: TrainedOptions, stage: str, log: str) -> dict | None:
    """Returns the state from which a stage goes on, or None. --restart removes it and the log first."""
    work = Path(options.work_dir)
    if options.restart:
        for name in (f"{stage}.pt", log):
            (work / name).unlink(missing_ok=True)
    return saved_state(work, stage) if (work / f"{stage}.pt").exists() else None


def finite(loss: float, step: int) -> float:
    """Returns a loss. Raises UserError, so that the last saved state is kept, if it is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"step {step}: a loss is {loss}; the last saved state is kept: give smaller rates")
    return loss


def use_device(options: TrainedOptions) -> torch.device:
    """Sets --threads and returns the device of --device. Raises CheckpointError for cuda without a GPU."""
    torch.set_num_threads(options.threads)
    return torch.device(pick_device(options.device))
