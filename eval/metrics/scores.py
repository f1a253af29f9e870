"""scores.json: what was measured of a folder's images, with what one needs to measure it again. No torch
but where a score is kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.errors import UserError
from eval.locks import alone
from eval.outputs import write_json

SCORES = "scores.json"


class Scores:
    """The record of one command on one folder."""

    def __init__(self, command: str, folder: str, path: str | None) -> None:
        """path: the file; None: beside the images. UserError, before anything is measured, if it cannot
        be."""
        self._command = command
        self._path = Path(path) if path else Path(folder) / SCORES
        if path and not self._path.parent.is_dir():
            raise UserError(
                f"--scores {path}: there is no folder {self._path.parent}; make it, or choose another"
            )
        read(self._path)

    def keep(
        self,
        scores: Mapping[str, float],
        weights: Mapping[str, str],
        facts: Mapping[str, Any],
        device: str,
        options: Mapping[str, Any],
    ) -> None:
        """Print the scores and append them; the last line printed is one JSON document.

        weights: digest of every network used. facts: what else a reader needs, the numbers of images above
        all. options: the command's, as they were settled.
        """
        from eval.session import environment

        entry = {
            "line": " ".join(["python", *map(os.path.basename, sys.argv[:1]), *sys.argv[1:]]),
            **environment(device),
            "weights": dict(weights),
            "command": self._command,
            **facts,
            "options": {name: value for name, value in options.items() if name not in ("debug", "config")},
            "scores": dict(scores),
        }
        for name, value in scores.items():
            print(f"  {name:<24} {value:.6g}")
        print(json.dumps(entry))
        append(self._path, entry)


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry; the file is replaced whole, and two programs adding at once both get in."""
    with alone(path.with_name(f".{path.name}.lock")):
        write_json(path, [*read(path), entry])


def read(path: Path) -> list[dict[str, Any]]:
    """All entries, oldest first; none if there is no file. UserError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
            raise ValueError("no list of scores")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): repair or move it, then score again") from None
    return content
