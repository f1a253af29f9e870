"""The measurements of a bench run, stored so that an interrupted run can continue. No torch.

    measurement_configs.json     the settings of the store (storage.store)
    measurements/NUMBER.json     one batch of prompts, measured under every configuration by one run

Figures that are compared with one another are in one file, because they were measured within the same
minutes. The `seconds` of an image contain the turns of the other configurations. A batch that a run did not
finish leaves no file, and a damaged file counts as none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from adt_tree.records import Decoded, Step
from models.checkpoint.files import reading
from storage.store import REMEDY, Store


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of prompts decoded under one configuration."""

    seconds: float  # per image
    images: list[Decoded]


Batch = dict[str, Measured]  # name of a configuration -> its measurement of the batch


class Measurements(Store):
    """The measurements in a folder, of this run and of earlier ones with the same fingerprint."""

    def __init__(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """fingerprint: everything that changes a measurement. UserError if the folder has another."""
        super().__init__(root / "measurement_configs.json", "measurements", fingerprint)

    def finished(self, number: int) -> Batch | None:
        """Returns the stored measurements of a batch of prompts; None, with a warning if they are damaged,
        where it is to be measured. Raises UserError if they belong to another fingerprint."""
        path = self.path(f"{number:05}")
        if not path.exists():
            return None
        try:
            content = self.read(path.stem)
            with reading(path, REMEDY):
                return {
                    name: Measured(float(entry["seconds"]), [_image(image) for image in entry["images"]])
                    for name, entry in content["measured"].items()
                }
        except CheckpointError:
            print(f"warning: {path} is damaged and is measured anew", file=sys.stderr)
            return None

    def add(self, number: int, batch: Batch) -> None:
        """Stores a batch of prompts that was measured under every configuration."""
        self.write(f"{number:05}", {"measured": {name: asdict(entry) for name, entry in batch.items()}})


def _image(stored: Mapping[str, Any]) -> Decoded:
    return Decoded(**{**stored, "steps": [Step(**step) for step in stored["steps"]]})
