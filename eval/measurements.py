"""What bench, sweep and budget measured, a line each, kept as made: interrupted runs go on. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from adt_tree.records import Decoded, Step
from eval.errors import UserError
from eval.locks import keep_alone
from eval.outputs import write_atomic, write_config
from models.checkpoint.files import append_line

Key = tuple[str, float]  # arm, temperature
FREE = ("output_dir", "config", "debug", "profile", "top")  # options that change no measurement


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of prompts decoded by one arm."""

    seconds: float  # an image
    images: list[Decoded]


@dataclass(slots=True)
class _Batch:
    """A batch of prompts in one run: its arms' measurements and their lines."""

    run: int
    started: str
    arms: dict[Key, Measured]
    lines: dict[Key, str]


class Measurements:
    """The measurements of a folder: those of earlier runs of one configuration, and those being made.

    A batch of prompts counts once one run measured it in every arm, so that all its arms were timed close
    together; anything else is dropped and measured anew.
    """

    def __init__(self, root: Path, keys: Sequence[Key], started: str) -> None:
        """keys: every arm. started: when this run was, for the record."""
        self.path = root / "measurements.jsonl"
        self._keys, self._started = set(keys), started
        self._batches: dict[tuple[str, ...], _Batch] = {}
        self._run, self._configuration = 1, ""
        self._lock: int | None = None  # held until this process ends: two would spoil each other's clocks
        self.added = 0  # measurements of this run

    def open(self, determines: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Create the folder or take up the measurements in it; UserError if their configuration differs."""
        write_config(self.path.parent / "measurement_configs.json", "measurements", determines, options)
        self._lock = keep_alone(self.path.with_suffix(".lock"))
        if self._lock is None:
            raise UserError(
                f"{self.path} is being written by another process: wait for it, or choose another "
                "--output_dir"
            )
        text = json.dumps(determines, sort_keys=True)
        self._configuration = hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            stored = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        *lines, _ = stored.split("\n")  # what follows the last newline is nothing, or torn
        batches: dict[tuple[int, tuple[str, ...]], _Batch] = {}
        for number, line in enumerate(lines, start=1):
            self._take(number, line, batches)
        for (run, names), batch in batches.items():
            self._run = max(self._run, run + 1)
            if set(batch.arms) == self._keys:
                self._batches[names] = batch
        kept = "".join(line + "\n" for batch in self._batches.values() for line in batch.lines.values())
        if kept != stored:
            write_atomic(self.path, kept.encode())

    def _take(self, number: int, line: str, batches: dict[tuple[int, tuple[str, ...]], _Batch]) -> None:
        """One stored line into its batch."""
        try:
            row = json.loads(line)
            configuration, run, key = row["configuration"], row["run"], (row["arm"], row["temperature"])
            images = [
                Decoded(**{**image, "steps": [Step(*step) for step in image["steps"]]})
                for image in row["images"]
            ]
            batch = batches.setdefault((run, tuple(row["prompts"])), _Batch(run, row["started"], {}, {}))
            batch.arms[key], batch.lines[key] = Measured(row["seconds"], images), line
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path}, line {number}, is damaged: delete the file, or choose another --output_dir"
            ) from None
        if configuration != self._configuration:
            raise UserError(
                f"{self.path}, line {number}, was measured under another configuration: delete the file, or "
                "choose another --output_dir"
            )

    def finished(self, names: Sequence[str]) -> dict[Key, Measured] | None:
        """What an earlier run measured of a batch of prompts, every arm; None if it is to be measured."""
        batch = self._batches.get(tuple(names))
        return batch.arms if batch is not None and set(batch.arms) == self._keys else None

    def add(self, names: Sequence[str], key: Key, measured: Measured) -> None:
        """Keep a measurement."""
        images = [
            {**asdict(image), "steps": [astuple(step) for step in image.steps]} for image in measured.images
        ]
        line = json.dumps(
            {
                "run": self._run,
                "started": self._started,
                "configuration": self._configuration,
                "prompts": list(names),
                "arm": key[0],
                "temperature": key[1],
                "seconds": measured.seconds,
                "images": images,
            }
        )
        append_line(self.path, line)
        self.added += 1
        fresh = _Batch(self._run, self._started, {}, {})
        batch = self._batches.setdefault(tuple(names), fresh)
        batch.arms[key], batch.lines[key] = measured, line

    def runs(self) -> list[dict[str, Any]]:
        """Runs that the measurements come from, oldest first; more than one: the result was assembled."""
        found: dict[int, dict[str, Any]] = {}
        for batch in self._batches.values():
            entry = found.setdefault(batch.run, {"started": batch.started, "measurements": 0})
            entry["measurements"] += len(batch.arms)
        return [found[run] for run in sorted(found)]
