"""What the training stages share: a timer, atomic checkpoints, measured figures, the choice of device."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.checkpoint.files import replacing
from models.loading import pick_device


class Every:
    """A timer that is due at most once in `period_s` seconds, for the first time after one period."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.last = time.monotonic()

    def due(self) -> bool:
        """Returns whether a period has passed. If so, the next one starts now."""
        if time.monotonic() - self.last < self.period_s:
            return False
        self.last = time.monotonic()
        return True


def save_checkpoint(path: Path, payload: dict) -> None:
    """Writes a checkpoint completely, or leaves the old one. Raises OSError, which names the path."""
    with replacing(path) as part, part.open("wb") as stream:
        torch.save(payload, stream)


def load_checkpoint(path: Path) -> dict | None:
    """Returns the payload, on the CPU; None if there is no such file."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def write_figures(work: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Prints measured figures as one line of JSON, and writes them to figures_NAME.json for the card."""
    line = json.dumps({name: figures})
    (work / f"figures_{name}.json").write_text(line + "\n")
    print(line)


def use_device(args: Any) -> torch.device:
    """Sets --threads and returns the device of --device. Raises CheckpointError for cuda without a GPU."""
    torch.set_num_threads(args.threads)
    return torch.device(pick_device(args.device))
