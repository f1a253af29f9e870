"""The measurements of a bench run, stored so that an interrupted run can continue. No torch.

    measurement_configs.json     the options, and the fingerprint that all runs in this folder share
    measurements/NUMBER.json     one batch of prompts, measured under every configuration by one run

Figures that are compared with one another are in one file, because they were measured within the same
minutes. The `seconds` of an image contain the turns of the other configurations. A batch that a run did not
finish leaves no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from adt_tree.records import Decoded, Step
from eval.runs.run_settings import digest, write_settings
from models.checkpoint.files import read_json, reading, write_json


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of prompts decoded under one configuration."""

    seconds: float  # per image
    images: list[Decoded]


Batch = dict[str, Measured]  # name of a configuration -> its measurement of the batch


class Measurements:
    """The measurements in a folder, of this run and of earlier ones with the same fingerprint."""

    def __init__(
        self, root: Path, started: str, fingerprint: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Makes the folder, or reads the measurements in it.

        started: date and time of this run. fingerprint: everything that changes a measurement. options:
        stored beside it for a reader. Raises UserError if the folder's fingerprint differs or a file is
        damaged.
        """
        write_settings(root / "measurement_configs.json", fingerprint, options)
        self.folder = root / "measurements"
        self.folder.mkdir(exist_ok=True)
        self._fingerprint, self._started = digest(fingerprint), started
        self._batches: dict[int, Batch] = {}
        self.runs: dict[int, dict[str, Any]] = {}  # number of a run -> when it started, prompts it measured
        for path in sorted(self.folder.glob("*.json")):
            self._read(path)
        self._run = 1 + max(self.runs, default=0)

    def _read(self, path: Path) -> None:
        remedy = "delete it, and its prompts are measured again"
        content = read_json(path, remedy)
        with reading(path, remedy):
            batch = {
                name: Measured(float(entry["seconds"]), [_unpack(image) for image in entry["images"]])
                for name, entry in content["measured"].items()
            }
            fingerprint = content["fingerprint"]
            run, started, count = int(content["run"]), content["started"], len(content["prompts"])
            self._register(int(path.stem), batch, run, started, count)
        if fingerprint != self._fingerprint:
            raise UserError(f"{path} was measured with other options: choose another --output_dir")

    def _register(self, number: int, batch: Batch, run: int, started: str, num_prompts: int) -> None:
        self._batches[number] = batch
        self.runs.setdefault(run, {"started": started, "prompts": 0})["prompts"] += num_prompts

    def finished(self, number: int) -> Batch | None:
        """Returns the stored measurements of a batch of prompts; None if it is still to be measured."""
        return self._batches.get(number)

    def add(self, number: int, prompts: Sequence[str], batch: Batch) -> None:
        """Stores a batch of prompts, given by their names, that was measured under every configuration."""
        measured = {
            name: {"seconds": entry.seconds, "images": [_pack(image) for image in entry.images]}
            for name, entry in batch.items()
        }
        content = {"run": self._run, "started": self._started, "fingerprint": self._fingerprint}
        path = self.folder / f"{number:05}.json"
        write_json(path, {**content, "prompts": list(prompts), "measured": measured}, indent=None)
        self._register(number, batch, self._run, self._started, len(prompts))


def _pack(image: Decoded) -> dict[str, Any]:
    return {**asdict(image), "steps": [tuple(step.as_dict().values()) for step in image.steps]}


def _unpack(image: Mapping[str, Any]) -> Decoded:
    return Decoded(**{**image, "steps": [Step(*step) for step in image["steps"]]})
