"""Reads what a run of generate_images leaves behind, without its times, and runs Python in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CLOCKS = ("time", "latency", "ms")  # keys of measured times


def python(*words: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process, on one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run([sys.executable, *map(str, words)], **options)


def statistics(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the statistics of every image by its name, without times."""
    (path,) = folder.glob("global_statistics_*.json")
    stored = json.loads(path.read_text())
    return {name: _without_times(entry) for name, entry in stored.items()}


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in CLOCKS}


def images(folder: Path) -> dict[str, bytes]:
    """Returns the images by their file names."""
    return {path.name: path.read_bytes() for path in (folder / "img").iterdir()}


def record(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Returns the statistics and the images of a run."""
    return statistics(folder), images(folder)


def contents(folder: Path) -> dict[str, Any]:
    """Returns everything that a run leaves, without times and options."""
    files: dict[str, Any] = {str(path.relative_to(folder)): None for path in folder.rglob("*")}
    files |= {name: (folder / name).read_bytes() for name in files if name.endswith(".png")}
    for name in (name for name in files if name.startswith("records/")):
        stored = json.loads((folder / name).read_text())
        files[name] = stored["codes"], [_without_times(step) for step in stored["steps"]]
    return files | {"statistics": [*statistics(folder).items()]}
