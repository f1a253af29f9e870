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

LAUNCHERS = (  # variables of a process's number and of the number of processes
    ("RANK", "WORLD_SIZE"),  # accelerate launch, torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # that of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun; in a batch script without srun the first is 0
)
ROOT = Path(__file__).resolve().parents[1]
CODE = ("adt_tree", "lab", "models", "storage", "eval")  # the folders on which a measurement depends


def worker() -> tuple[int, int]:
    """Returns this process's number, from 0, and how many processes the launcher started. Without a launcher:
    (0, 1). Raises UserError for a number outside of these, whose images another process makes as well."""
    for names in LAUNCHERS:
        rank, count = (os.environ.get(name, "") for name in names)
        if rank and count:
            if rank not in map(str, range(int(count))):
                raise UserError(f"{names[0]}={rank} with {names[1]}={count}: processes count from 0")
            return int(rank), int(count)
    return 0, 1


def refuse_several() -> None:
    """Raises UserError under a launcher of several processes, for a command that does not divide its work."""
    count = worker()[1]
    if count > 1:
        raise UserError(f"a launcher has started {count} processes: this command runs in one; start it alone")


def synchronise(device: torch.device) -> None:
    """Waits until the accelerator has finished, so that a clock read next is right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: str) -> dict[str, Any]:
    """Returns the origin of a figure measured now: commit, date, device, threads and torch's version.

    device: cpu or cuda. "code" is a hash of the code that is measured. If git fails, or its repository does
    not hold this code, "commit" and "dirty" are None.
    """
    cpu = torch.cpu.get_capabilities().get("cpu_name", "unknown")
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {cpu}"
    # A repository around a copy of this code, such as a user's, says nothing of it.
    git = _git if _git("ls-files", "--error-unmatch", __file__) else lambda *_: None
    status, code = git("status", "--porcelain", "--untracked-files=no"), hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": None if status is None else bool(status),
        "code": code.hexdigest()[:16],
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
