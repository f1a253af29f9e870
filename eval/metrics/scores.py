"""scores.json: what was measured of a folder's images, with what one needs to measure it again. No torch
but where a score is kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from eval.runs.locks import alone
from eval.runs.run_folder import write_json

SCORES = "scores.json"


def record_of(folder: str, path: str | None) -> Path:
    """The file that scores of a folder's images go to: path, or beside the images.

    UserError, before anything is measured, if they cannot.
    """
    if path and not Path(path).parent.is_dir():
        raise UserError(f"--scores {path}: there is no folder {Path(path).parent}; make it or choose another")
    record = Path(path) if path else Path(folder) / SCORES
    read(record)
    return record


def keep(
    record: Path,
    command: str,
    options: Any,
    device: str,
    scores: Mapping[str, float],
    weights: Mapping[str, str],
    facts: Mapping[str, Any],
) -> None:
    """Print the scores and append them; the last line printed is one JSON document.

    options: the command's dataclass. weights: digest of every network used. facts: what else a reader needs,
    the numbers of images above all.
    """
    from eval.runs.session import environment

    entry = {
        "line": " ".join(["python", *map(os.path.basename, sys.argv[:1]), *sys.argv[1:]]),
        **environment(device),
        "weights": dict(weights),
        "command": command,
        **facts,
        "options": {k: value for k, value in asdict(options).items() if k not in ("debug", "config")},
        "scores": dict(scores),
    }
    for name, value in scores.items():
        print(f"  {name:<24} {value:.6g}")
    print(json.dumps(entry))
    append(record, entry)


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
