"""scores.jsonl: one line for every measurement of a folder's images, with what is needed to repeat it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from models.checkpoint.files import append_json, json_text, read_json_lines, reading

SCORES = "scores.jsonl"


def scores_path(folder: str, path: str | None) -> Path:
    """Returns the file that scores of a folder's images are appended to: path, or one beside the images.

    Call it before anything is measured: it raises UserError if the folder of path does not exist.
    """
    if path and not Path(path).parent.is_dir():
        raise UserError(f"scores {path}: there is no folder {Path(path).parent}; make it or choose another")
    return Path(path) if path else Path(folder) / SCORES


@contextmanager
def warning_if_not_stored() -> Iterator[None]:
    """Turns an error of writing into a line of warning, so that what was computed is still printed."""
    try:
        yield
    except OSError as error:
        print(f"warning: what was computed is not stored: {error}", file=sys.stderr)


def record_scores(
    record: Path,
    settings: Mapping[str, Any],
    device: str,
    facts: Mapping[str, Any],
    scores: Mapping[str, float],
) -> None:
    """Prints the scores and appends them to the record. The last line printed is the one appended.

    settings: of the measurement. facts: further fields of the line, such as the numbers of images.
    """
    from storage.process import environment

    entry = {
        "line": " ".join(["python", *map(os.path.basename, sys.argv[:1]), *sys.argv[1:]]),
        **environment(device),
        "command": "evaluate",
        **facts,
        "options": dict(settings),
        "scores": dict(scores),
    }
    for name, value in scores.items():
        print(f"  {name:<24} {value:.6g}")
    print(json_text(entry))
    with warning_if_not_stored():
        append_json(record, entry)


def newest_scores(path: Path) -> dict[str, float]:
    """Returns the last value of each score in a record, but those that were not finite; no scores if there is
    no file.

    Raises UserError if the file is damaged.
    """
    remedy = "remove the damaged line, or the file"
    entries = read_json_lines(path, remedy)
    with reading(path, remedy):
        newest = {name: value for entry in entries for name, value in entry["scores"].items()}
        finite = {name: float(value) for name, value in newest.items() if value is not None}
    return finite
