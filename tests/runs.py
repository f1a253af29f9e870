"""What a run of generate_images leaves, but for its clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLOCKS = ("time", "latency")


def statistics(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every image."""
    (path,) = folder.glob("global_statistics_*.json")
    stored = json.loads(path.read_text())
    return {name: {k: v for k, v in entry.items() if k not in CLOCKS} for name, entry in stored.items()}


def images(folder: Path) -> dict[str, bytes]:
    """The pictures by their file's name."""
    return {path.name: path.read_bytes() for path in (folder / "img").iterdir()}


def record(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Both."""
    return statistics(folder), images(folder)
