"""The files of a drafter's training run: one folder per saved state, and the log.

state_STEP/ holds config.json and model.safetensors, which --drafter_path loads, and in the newest state
trainer.pt, from which training resumes. A state appears whole, by a rename, or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from adt_tree.errors import refuse_other
from models.checkpoint.files import read_json_lines, reading, replacing

TRAINER = "trainer.pt"
LOG = "log.jsonl"


def states(root: Path) -> list[Path]:
    """Returns the folder's states, oldest first."""
    folders = [path for path in root.glob("state_*") if re.fullmatch(r"state_\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("state_")))


def discard(root: Path) -> None:
    """Removes every state and the log, and no other file."""
    for path in states(root):
        shutil.rmtree(path)
    (root / LOG).unlink(missing_ok=True)


def save(root: Path, step: int, payload: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Saves state_STEP, unless it is there to resume from, and returns its folder. If that fails, or the
    process is killed, the earlier states are unchanged.

    write: a function that writes the drafter into a folder.
    """
    home, part = root / f"state_{step}", root / f".state_{step}.part"
    if (home / TRAINER).is_file():
        return home
    for stale in (part, home):
        shutil.rmtree(stale, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
        with replacing(part / TRAINER) as file, file.open("wb") as stream:
            torch.save(dict(payload), stream)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    os.replace(part, home)
    for older in states(root):
        if older != home:
            (older / TRAINER).unlink(missing_ok=True)
    return home


def resume(root: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest state's payload, on the CPU; None if there is none.

    Raises UserError if it was trained with other settings, or cannot be read.
    """
    resumable = [path for path in states(root) if (path / TRAINER).is_file()]
    if not resumable:
        return None
    path = resumable[-1] / TRAINER
    with reading(path, f"remove {path.parent}, or restart"):
        payload = torch.load(path, map_location="cpu", weights_only=True)
        saved = payload["settings"]
    remedy = "give the same, choose another save_dir, or restart, which discards it"
    refuse_other(saved, settings, f"{path} was trained with", remedy)
    return payload


def cut_log(root: Path, step: int) -> None:
    """Creates the run's folder, and removes rows after `step` from its log."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / LOG
    if not path.exists():
        return
    rows = read_json_lines(path, "remove the damaged line, or the file")
    kept = [json.dumps(row) + "\n" for row in rows if row.get("step", 0) <= step]
    with replacing(path) as part:
        part.write_text("".join(kept), encoding="utf-8")
