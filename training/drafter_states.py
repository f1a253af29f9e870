"""What a drafter's training leaves behind: state_N with the drafter and what a resume needs, and the log.

state_N/ holds config.json and model.safetensors, which --drafter_path loads, and trainer.pt, which only the
newest keeps. A state appears whole, by a rename, or not at all.
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

from adt_tree.errors import UserError, reason
from models.checkpoint.files import replacing
from training.loop import save_checkpoint

TRAINER = "trainer.pt"
LOG = "log.jsonl"


def states(root: Path) -> list[Path]:
    """The folder's states, oldest first."""
    found = [path for path in root.glob("state_*") if re.fullmatch(r"state_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("state_")))


def discard(root: Path) -> None:
    """Remove every state and the log, and nothing else."""
    for path in states(root):
        shutil.rmtree(path)
    (root / LOG).unlink(missing_ok=True)


def save(root: Path, epoch: int, payload: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Make state_EPOCH; write puts the drafter into the folder it is given. What fails leaves the others."""
    home, part, old = root / f"state_{epoch}", root / f".state_{epoch}.part", root / f".state_{epoch}.old"
    for stale in (part, old):
        shutil.rmtree(stale, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
        save_checkpoint(part / TRAINER, dict(payload))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if home.exists():
        os.replace(home, old)
    os.replace(part, home)
    shutil.rmtree(old, ignore_errors=True)
    for older in states(root):
        if older != home:
            (older / TRAINER).unlink(missing_ok=True)
    return home


def resume(root: Path, determines: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest payload, on the CPU; None if there is none.

    UserError if it was trained otherwise (determines), or cannot be read.
    """
    kept = [path for path in states(root) if (path / TRAINER).is_file()]
    if not kept:
        return None
    path = kept[-1] / TRAINER
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
        before = payload["determines"]
    except Exception as error:  # zip, pickle and torch each have their own
        raise UserError(
            f"{path} cannot be read ({reason(error)}): remove {path.parent}, or --restart"
        ) from None
    for name, value in determines.items():
        if before.get(name) != value:
            raise UserError(
                f"{path} was trained with {name} = {before.get(name)!r}, now it is {value!r}: give the same, "
                "choose another --save_dir, or --restart, which discards it"
            )
    return payload


def cut_log(root: Path, step: int) -> None:
    """Make the run's folder, and drop the log's rows of later steps than the one it goes on from, and a torn
    one."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / LOG
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("step", 0) <= step:
            kept.append(line + "\n")
    with replacing(path) as part:
        part.write_text("".join(kept), encoding="utf-8")
