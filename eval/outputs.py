"""A run's folder: images, statistics, steps and configuration, each written whole or not at all. No torch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from adt_tree.records import Decoded
from eval.errors import UserError
from eval.prompts import Prompt

MOST_NAME = 100  # characters of a file name that come from the prompt's name
DUMP = "dump"  # the folder of a run's dumps
STEPS = "steps.jsonl"  # its cycles, one a line
FLUSH_SHARE = 20  # statistics are rewritten as often as keeps the writing below 1/20 of the time


def file_name(name: str) -> str:
    """A prompt's name as a file name: unchanged where harmless, else cleaned and made unique by a hash."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-")[:MOST_NAME]
    if clean == name:
        return name
    return f"{clean}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside and rename: a reader sees the old file or the new one. OSError names the path."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_json(path: Path, content: object) -> None:
    """Indented JSON, atomically."""
    write_atomic(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def png_bytes(image: Image.Image) -> bytes:
    """PNG without metadata: the same pixels give the same bytes."""
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or choose another --output_dir") from None


def _step(line: str) -> dict[str, Any]:
    """One line of steps.jsonl; empty if it is torn."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}


def read_steps(path: Path, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The cycles of some images stored in a steps.jsonl; none where it, or the image, is missing."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    if found and path.exists():
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                step = _step(line)
                if step.get("name") in found:
                    found[step["name"]].append(step)
    return found


def claim(path: Path, made: str, determines: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Create a run's folder, or check that the run in it had the same configuration.

    path: the folder's configuration file. made: what the folder holds. determines: all that changes what is
    made or its record; UserError if the folder's differ. options: the parsed command line, stored as it is.
    """
    root, key = path.parent, f"determines_{made}"
    if root.exists() and not root.is_dir():
        raise UserError(f"--output_dir {root}: it is a file; give a folder")
    root.mkdir(parents=True, exist_ok=True)
    wanted, stored = json.loads(json.dumps(determines)), _read_json(path)
    if stored is not None:
        before = stored.get(key) if isinstance(stored, dict) else None
        if not before:
            raise UserError(
                f"--output_dir {root}: it belongs to another program's run; choose another folder"
            )
        for name in sorted(set(before) | set(wanted)):
            if before.get(name) != wanted.get(name):
                raise UserError(
                    f"--output_dir {root} holds {made} made with {name} = {before.get(name)!r}, now it is "
                    f"{wanted.get(name)!r}: choose another folder or the same options"
                )
    write_json(path, {**options, key: wanted})


class RunFolder:
    """Everything generate_images leaves behind, and what an earlier run of the same configuration left.

    An image counts as finished once its PNG, and its dump if it is to have one, exist and the statistics name
    it; anything else is made anew.
    """

    def __init__(
        self, root: Path, window: tuple[int, int], prompts: Sequence[Prompt], dumped: int = 0
    ) -> None:
        """window: --start_idx, --end_idx, which selected the prompts. dumped: the first prompts that must
        leave a dump. UserError if two names give one file."""
        self.root, self.images, self.dumps = root, root / "img", root / DUMP
        self.first = window[0]  # the first prompt's place among all that the folder's runs select from
        self.dumped = {prompt.name for prompt in prompts[:dumped]}
        self.statistics_path = root / f"global_statistics_{window[0]}_{window[1]}.json"
        self.steps_path = root / STEPS
        self.files = {prompt.name: file_name(prompt.name) for prompt in prompts}
        self._prompts = {prompt.name: prompt for prompt in prompts}
        self.statistics: dict[str, dict[str, Any]] = {}
        self._written, self._cost = 0.0, 0.0
        seen: dict[str, str] = {}
        for name, file in self.files.items():
            other = seen.setdefault(file.lower(), name)
            if other != name:
                raise UserError(
                    f"prompt names {other[:80]!r} and {name[:80]!r} give the same file {file}.png: rename one"
                )

    def open(self, determines: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Create the folder or take up the run in it.

        determines: all that changes an image or its record; UserError if the folder's differ.
        options: the parsed command line, stored as it is.
        """
        claim(self.root / "generation_configs.json", "images", determines, options)
        self.images.mkdir(exist_ok=True)
        if self.dumped:
            self.dumps.mkdir(exist_ok=True)
        self._load()

    def _load(self) -> None:
        """Take over finished images; drop steps of images that will be made anew."""
        for name, entry in (_read_json(self.statistics_path) or {}).items():
            prompt = self._prompts.get(name)
            if prompt is not None and entry.get("prompt") != prompt.text:
                raise UserError(
                    f"--output_dir {self.root}: image {name} has another prompt; choose another folder"
                )
            if self.png(name).is_file() and (name not in self.dumped or self.dump(name).is_file()):
                self.statistics[name] = entry
        if self.steps_path.exists():
            pending = set(self._prompts) - set(self.statistics)
            lines = self.steps_path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [
                line
                for line in lines
                if line.endswith("\n") and _step(line).get("name", "") not in {*pending, ""}
            ]
            if len(kept) != len(lines):
                write_atomic(self.steps_path, "".join(kept).encode())

    def png(self, name: str) -> Path:
        """Where an image lies."""
        return self.images / f"{self.files.get(name) or file_name(name)}.png"

    def dump(self, name: str) -> Path:
        """Where an image's dump lies."""
        return self.dumps / f"{self.files.get(name) or file_name(name)}.safetensors"

    def finished(self) -> dict[str, dict[str, Any]]:
        """Statistics of this run's finished images, in the order of the prompts."""
        return {name: self.statistics[name] for name in self._prompts if name in self.statistics}

    def add_dump(self, name: str, data: bytes) -> None:
        """Keep an image's dump, before the image is declared finished."""
        write_atomic(self.dump(name), data)

    def add(self, decoded: Decoded, image: Image.Image, decode_s: float) -> None:
        """Keep a finished image: steps, PNG, then the statistics that declare it finished."""
        prompt = self._prompts[decoded.name]
        lines = [json.dumps({"name": decoded.name, **asdict(step)}) + "\n" for step in decoded.steps]
        with self.steps_path.open("a", encoding="utf-8") as stream:
            stream.write("".join(lines))
        write_atomic(self.png(decoded.name), png_bytes(image))
        self.statistics[decoded.name] = {
            "prompt": prompt.text,
            "acceptance_length": decoded.tau,
            "step_compression": decoded.tau,
            "time": decoded.seconds + decode_s,
            "latency": decoded.seconds,
            "ann_id": prompt.number,
            **dict(prompt.facts),
            "seed": decoded.seed,
            "target_calls": decoded.target_calls,
            "drafter_calls": decoded.drafter_calls,
            "mean_depth": decoded.mean_depth,
            "mean_nodes": decoded.mean_nodes,
        }
        started = time.perf_counter()
        if started - self._written >= FLUSH_SHARE * self._cost:
            self.flush()
            self._written = time.perf_counter()
            self._cost = self._written - started

    def flush(self) -> None:
        """Write the statistics."""
        write_json(self.statistics_path, self.statistics)
