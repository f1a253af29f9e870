"""The process that runs a command, and its machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from adt_tree.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CODE = ("adt_tree", "models", "eval", "cli", "serve", "training", "demo", "main.py")


def worker() -> tuple[int, int]:
    """Returns this process's number, from 0, and how many processes the launcher started: RANK and WORLD_SIZE
    of accelerate launch and torchrun. Without a launcher: (0, 1). Raises UserError for other values, and if
    one of the two is missing."""
    values = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if not any(values.values()):
        return 0, 1
    for name, value in values.items():
        if not value.isdecimal():
            raise UserError(
                f"{name}={value!r}: launchers set {' and '.join(values)} to numbers; unset both or repair it"
            )
    rank, count = (int(value) for value in values.values())
    if rank >= count:
        raise UserError(f"RANK={rank} with WORLD_SIZE={count}: ranks count from 0; unset or repair them")
    return rank, count


def refuse_several() -> None:
    """Raises UserError under a launcher of several processes, for a command that does not divide its work."""
    count = worker()[1]
    if count > 1:
        raise UserError(f"WORLD_SIZE={count}: this command runs in one process; start it without a launcher")


def synchronise(device: torch.device) -> None:
    """Waits until the accelerator has finished, so that a clock read next is right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: str) -> dict[str, Any]:
    """Returns the origin of a figure measured now: commit, date, device, threads and torch's version.

    device: cpu or cuda. "changes" is a hash of uncommitted changes to the code that runs, or None. If git
    fails, or its repository does not hold this code, all three are None: the code is unknown.
    """
    cpu = torch.cpu.get_capabilities().get("cpu_name", "unknown")
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {cpu}"
    # A repository around a copy of this code, such as a user's, says nothing of it.
    git = _git if _git("ls-files", "--error-unmatch", __file__) else lambda *_: None
    changes, status = git("diff", "HEAD", "--", *CODE), git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": None if status is None else bool(status),
        "changes": hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _git(*words: str) -> str | None:
    """Returns what a git command prints in this repository; None if it fails or there is no repository."""
    try:
        answer = subprocess.run(
            ("git", *words), cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
