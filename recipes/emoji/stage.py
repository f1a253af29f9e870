"""What the stages share: options, atomic checkpoints, the choice of device."""

from __future__ import annotations

from pathlib import Path

import torch

from cli.parser import Options, declare, option
from models.checkpoint.files import replacing
from models.loading import pick_device


@declare
class StageOptions(Options):
    """stage"""

    work_dir: str = option("folder of the data and of everything the stages write", "data/emoji", unit="DIR")


@declare
class TrainedOptions(StageOptions):
    """training"""

    restart: bool = option("discard the results of an earlier run of this stage", False)
    device: str = option("auto: cuda where there is one", "auto", choices=("auto", "cpu", "cuda"))
    threads: int = option("torch threads on the CPU", 2, unit="N", least=1)
    seed: int = option("seed of the initial weights", 0, unit="SEED")
    save_steps: int = option("steps between saved states", 250, unit="N", least=1)


def save_checkpoint(path: Path, payload: dict) -> None:
    """Writes a checkpoint completely, or leaves the old one. Raises OSError, which names the path."""
    with replacing(path) as part, part.open("wb") as stream:
        torch.save(payload, stream)


def load_checkpoint(path: Path) -> dict | None:
    """Returns the payload, on the CPU; None if there is no such file."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def use_device(options: TrainedOptions) -> torch.device:
    """Sets --threads and returns the device of --device. Raises CheckpointError for cuda without a GPU."""
    torch.set_num_threads(options.threads)
    return torch.device(pick_device(options.device))
