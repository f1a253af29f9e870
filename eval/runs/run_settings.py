"""The options of the run that owns a folder, and the refusal to continue it with others. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError, refuse_other
from models.checkpoint.files import read_json, write_json

FINGERPRINT = "fingerprint"  # key of the stored settings under which the fingerprint stands


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits that stand for a fingerprint in every file of its run."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]


def check_settings(path: Path, fingerprint: Mapping[str, Any]) -> None:
    """Raises UserError if the run stored at `path` had another fingerprint, and names what differs.

    fingerprint: everything that changes what the run makes or records.
    """
    root, fingerprint = path.parent, json.loads(json.dumps(fingerprint))
    if root.exists() and not root.is_dir():
        raise UserError(f"--output_dir {root} is a file; give a folder")
    if not path.exists():
        return
    settings = read_json(path, "delete it, or choose another --output_dir")
    stored = settings.get(FINGERPRINT) if isinstance(settings, dict) else None
    if not isinstance(stored, dict):
        raise UserError(
            f"--output_dir {root}: another version of this program, or another program, wrote {path.name}; "
            "choose another folder"
        )
    now = {name: fingerprint.get(name) for name in sorted({*stored, *fingerprint})}
    remedy = "choose another folder or give the same options"
    refuse_other(stored, now, f"--output_dir {root} holds a run with", remedy)


def write_settings(path: Path, fingerprint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Makes a run's folder and stores its options and fingerprint there. Raises UserError as check_settings.

    Call it after the last check, because settings stored by a run that is refused would refuse the next run.
    """
    check_settings(path, fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**options, FINGERPRINT: dict(fingerprint)})
