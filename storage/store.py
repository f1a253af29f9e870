"""The records of the runs that share a folder. No torch.

    SETTINGS.json       the options, and the fingerprint: everything that changes a record
    RECORDS/NAME.json   a record; its key `run` is a digest of the fingerprint

A record is written completely or not at all, so a process may be killed at any moment and started again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError, refuse_other
from models.checkpoint.files import read_json, reading, write_json

FINGERPRINT = "fingerprint"  # key of the settings
REMEDY = "run the same command again, which makes it anew"


class Store:
    """The records of one fingerprint."""

    def __init__(self, settings: Path, records: str, fingerprint: Mapping[str, Any]) -> None:
        """Looks at the folder of `settings`; nothing is written before start(). records: their folder's name.

        Raises UserError if the folder holds records of another fingerprint, and names what differs.
        """
        self.folder, self._settings = settings.parent / records, settings
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self._run = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
        self._check()

    def _check(self) -> None:
        root = self._settings.parent
        if not self._settings.exists():
            return
        settings = read_json(self._settings, "delete it, or choose another output_dir")
        stored = settings.get(FINGERPRINT) if isinstance(settings, dict) else None
        if not isinstance(stored, dict):
            raise UserError(
                f"output_dir {root}: another program wrote {self._settings.name}; choose another folder"
            )
        now = {name: self.fingerprint.get(name) for name in sorted({*stored, *self.fingerprint})}
        remedy = "choose another folder or give the same options"
        refuse_other(stored, now, f"output_dir {root} holds a run with", remedy)

    def start(self, options: Mapping[str, Any]) -> None:
        """Makes the folder and stores the options beside the fingerprint. Raises UserError as __init__.

        Call it after the last check, because settings of a run that is refused would refuse the next one.
        """
        self._check()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._settings, {**options, FINGERPRINT: self.fingerprint})

    def path(self, name: str) -> Path:
        """Returns the path of a record."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any]:
        """Returns a record. Raises CheckpointError if it is damaged, and UserError if it belongs to another
        fingerprint."""
        path = self.path(name)
        content = read_json(path, REMEDY)
        with reading(path, REMEDY):
            if content["run"] != self._run:
                raise UserError(f"{path}: made with other options; give another output_dir")
        return content

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Stores a record."""
        write_json(self.path(name), {**content, "run": self._run}, indent=None)
