"""What training stages share: how often, atomic checkpoints, figures, the device."""

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
    """True at most once in `period_s` seconds; the first time after one period."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.last = time.monotonic()

    def due(self) -> bool:
        """Whether a period has passed; if so the next one starts."""
        if time.monotonic() - self.last < self.period_s:
            return False
        self.last = time.monotonic()
        return True


def save_checkpoint(path: Path, payload: dict) -> None:
    """Write a whole checkpoint or nothing. OSError names the path."""
    with replacing(path) as part, part.open("wb") as stream:
        torch.save(payload, stream)


def load_checkpoint(path: Path) -> dict | None:
    """The payload, on the CPU, or None if there is no such file."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def write_figures(work: Path, name: str, found: Mapping[str, Any]) -> None:
    """Print measured figures as a JSON line and keep them as figures_NAME.json, for the model card."""
    line = json.dumps({name: found})
    (work / f"figures_{name}.json").write_text(line + "\n")
    print(line)


def use_device(args: Any) -> torch.device:
    """The device of --device, after setting --threads. CheckpointError if cuda is asked for and missing."""
    torch.set_num_threads(args.threads)
    return torch.device(pick_device(args.device))
