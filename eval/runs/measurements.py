"""measurements.jsonl: what bench has measured, so that an interrupted run goes on. No torch.

One line is one batch of prompts, measured under every configuration by one run: figures that are compared
were always timed close together. A batch that a run did not complete leaves no line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from adt_tree.records import Decoded, Step
from adt_tree.errors import UserError
from eval.runs.locks import alone
from eval.runs.run_folder import write_atomic, write_config
from models.checkpoint.files import append_line


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of prompts decoded under one configuration."""

    seconds: float  # per image
    images: list[Decoded]


Batch = dict[str, Measured]  # configuration's name -> what was measured


class Measurements:
    """The measurements in a folder: those of earlier runs of the same fingerprint, and those being made."""

    def __init__(
        self, root: Path, started: str, fingerprint: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Create the folder or take up what is in it.

        started: when this run was, for the record. fingerprint: all that changes a measurement; UserError if
        the folder's differs, is damaged or is in use. options: stored beside it for a reader.
        """
        self.path = root / "measurements.jsonl"
        write_config(root / "measurement_configs.json", "measurements", fingerprint, options)
        try:
            self._lock = alone(self.path.with_suffix(".lock"), wait=False)  # two would spoil their clocks
        except Timeout:
            raise UserError(
                f"{self.path} is being written by another process: wait for it, or choose another "
                "--output_dir"
            ) from None
        text = json.dumps(fingerprint, sort_keys=True)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._started, self._run = started, 1
        self._batches: dict[tuple[str, ...], Batch] = {}
        self.runs: dict[int, dict[str, Any]] = {}  # what each run contributed
        self._read()

    def _read(self) -> None:
        """Take up stored lines; what follows the last newline was torn by a kill and goes."""
        if not self.path.exists():
            return
        whole, torn, rest = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        for number, line in enumerate(whole.split("\n") if torn else (), start=1):
            try:
                row = json.loads(line)
                names, run, fingerprint = tuple(row["prompts"]), int(row["run"]), row["fingerprint"]
                batch = {name: Measured(float(own["seconds"]), [_unpacked(image) for image in own["images"]])
                         for name, own in row["measured"].items()}  # fmt: skip
                self._take(names, run, row["started"], batch)
                fault = "" if fingerprint == self._fingerprint else "was measured with other options"
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                fault = "is damaged"
            if fault:
                raise UserError(
                    f"{self.path}, line {number}, {fault}: delete the file, or choose another --output_dir"
                )
        self._run = 1 + max(self.runs, default=0)
        if rest:
            write_atomic(self.path, (whole + torn).encode())

    def _take(self, names: tuple[str, ...], run: int, started: str, batch: Batch) -> None:
        self._batches[names] = batch
        entry = self.runs.setdefault(run, {"started": started, "prompts": 0})
        entry["prompts"] += len(names)

    def finished(self, names: Sequence[str]) -> Batch | None:
        """What an earlier run measured of a batch of prompts; None if it is to be measured."""
        return self._batches.get(tuple(names))

    def add(self, names: Sequence[str], batch: Batch) -> None:
        """Keep a batch of prompts, measured under every configuration."""
        measured = {name: {"seconds": own.seconds, "images": [_packed(image) for image in own.images]}
                    for name, own in batch.items()}  # fmt: skip
        line = {"run": self._run, "started": self._started, "fingerprint": self._fingerprint}
        append_line(self.path, json.dumps({**line, "prompts": list(names), "measured": measured}))
        self._take(tuple(names), self._run, self._started, batch)


def _packed(image: Decoded) -> dict[str, Any]:
    return {**asdict(image), "steps": [astuple(step) for step in image.steps]}


def _unpacked(image: Mapping[str, Any]) -> Decoded:
    return Decoded(**{**image, "steps": [Step(*step) for step in image["steps"]]})
