"""A run's folder: images, statistics, steps and configuration, each written whole or not at all. No torch.

A finished image is its PNG and then its record, a small file under queue/. Whoever ends puts all records
there are into the statistics and steps, so a run of any number of processes ends with both complete, and a
process that was killed has lost the image in hand and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from adt_tree.records import Decoded
from adt_tree.errors import UserError
from eval.runs.locks import alone
from eval.runs.prompts import Prompt
from models.checkpoint.files import replacing

MOST_NAME = 100  # characters of a file name that come from the prompt's name
STEPS = "steps.jsonl"  # its steps, one per line
QUEUE = "queue"  # records of images that are finished and not yet in the statistics
LOCK = ".lock"  # held while a run's statistics are written
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


def file_name(name: str) -> str:
    """A prompt's name as a file name: unchanged where harmless, else cleaned and made unique by a hash."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-")[:MOST_NAME]
    if clean == name:
        return name
    return f"{clean}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file or nothing. OSError names the path."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_json(path: Path, content: object) -> None:
    """Indented JSON, atomically."""
    write_atomic(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def png_bytes(image: Image.Image) -> bytes:
    """PNG without metadata: the same pixels give the same bytes."""
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def whole_png(path: Path) -> bool:
    """Whether a file begins and ends as a PNG does: a truncated or emptied one does not."""
    try:
        with path.open("rb") as stream:
            start = stream.read(len(PNG_START))
            stream.seek(-len(PNG_END), io.SEEK_END)
            return start == PNG_START and stream.read() == PNG_END
    except OSError:
        return False


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or choose another --output_dir") from None


def _read_entries(path: Path, *names: str) -> dict[str, Any]:
    """A JSON object of objects (or lists) with at least these names. UserError if it is anything else."""
    content = _read_json(path)
    whole = isinstance(content, dict) and all(isinstance(value, dict | list) for value in content.values())
    if not whole or any(name not in content for name in names):
        raise UserError(f"{path} is damaged: delete it, or choose another --output_dir")
    return content


def _step(line: str) -> dict[str, Any]:
    """One line of steps.jsonl; empty if it is torn or names no image."""
    try:
        step = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return step if isinstance(step, dict) and isinstance(step.get("name"), str) else {}


def read_steps(path: Path, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The steps of some images stored in a steps.jsonl; none where it, or the image, is missing."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    if found and path.exists():
        with path.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                step = _step(line)
                if step.get("name") in found:
                    found[step["name"]].append(step)
    return found


def make_folder(root: Path) -> None:
    """Create an output folder. UserError if it is a file."""
    if root.exists() and not root.is_dir():
        raise UserError(f"--output_dir {root}: it is a file; give a folder")
    root.mkdir(parents=True, exist_ok=True)


def read_statistics(root: Path) -> dict[str, dict[str, Any]]:
    """The statistics in a run's folder, of all its windows of prompts. UserError if there are none."""
    paths = root.glob("global_statistics_*.json")
    paths = sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    if not paths:
        raise UserError(f"{root}: it holds no global_statistics_*.json; give a folder of generate_images")
    return {name: entry for path in paths for name, entry in _read_entries(path).items()}


def tau_of(entries: Collection[Mapping[str, Any]]) -> float:
    """Codes per target call over the images of these statistics: every call counts alike, not every image."""
    calls = sum(entry["target_calls"] for entry in entries)
    return sum(entry["acceptance_length"] * entry["target_calls"] for entry in entries) / max(calls, 1)


def check_config(path: Path, made: str, fingerprint: Mapping[str, Any]) -> None:
    """UserError if the run in a folder was not of this fingerprint. Writes nothing.

    path: the folder's configuration file. made: what the folder holds. fingerprint: all that changes what is
    made or its record.
    """
    root, wanted = path.parent, json.loads(json.dumps(fingerprint))
    if root.exists() and not root.is_dir():
        raise UserError(f"--output_dir {root}: it is a file; give a folder")
    stored = _read_json(path)
    if stored is None:
        return
    before = stored.get(f"determines_{made}") if isinstance(stored, dict) else None
    if not isinstance(before, dict) or not before:
        raise UserError(f"--output_dir {root}: it belongs to another program's run; choose another folder")
    for name in sorted(set(before) | set(wanted)):
        if before.get(name) != wanted.get(name):
            raise UserError(
                f"--output_dir {root} holds {made} made with {name} = {before.get(name)!r}, now it is "
                f"{wanted.get(name)!r}: choose another folder or the same options"
            )


def write_config(path: Path, made: str, fingerprint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Create a run's folder and keep its options and fingerprint, unless another run was quicker.

    Call it after the last check: a refused run must leave no folder that refuses the next.
    """
    make_folder(path.parent)
    with alone(path.parent / LOCK):
        check_config(path, made, fingerprint)
        write_json(path, {**options, f"determines_{made}": dict(fingerprint)})


class RunFolder:
    """Everything generate_images leaves behind, and what other runs of the same configuration left.

    An image whose PNG is missing or truncated is made anew.
    """

    def __init__(
        self, root: Path, window: tuple[int, int], prompts: Sequence[Prompt], fingerprint: Mapping[str, Any]
    ) -> None:
        """Look at the folder; nothing is written before start().

        window: --start_idx, --end_idx, which selected the prompts. fingerprint: all that changes an image or
        its record. UserError if two names give one file, or if the folder's run was of another fingerprint.
        """
        self.root, self.images = root, root / "img"
        self.statistics_path = root / f"global_statistics_{window[0]}_{window[1]}.json"
        self.steps_path = root / STEPS
        self.files = {prompt.name: file_name(prompt.name) for prompt in prompts}
        self._prompts = {prompt.name: prompt for prompt in prompts}
        self._queue, self._config = root / QUEUE, root / "generation_configs.json"
        self._fingerprint = fingerprint
        seen: dict[str, str] = {}
        for name, file in self.files.items():
            other = seen.setdefault(file.lower(), name)
            if other != name:
                raise UserError(
                    f"prompt names {other[:80]!r} and {name[:80]!r} give the same file {file}.png: rename one"
                )
        check_config(self._config, "images", fingerprint)
        self.statistics = self._stored()

    def start(self, options: Mapping[str, Any]) -> None:
        """Make the folder, or take up the run in it. options: the parsed command line, stored as it is."""
        write_config(self._config, "images", self._fingerprint, options)
        self.images.mkdir(exist_ok=True)

    def png(self, name: str) -> Path:
        """Where an image lies."""
        return self.images / f"{self.files.get(name) or file_name(name)}.png"

    def _record(self, name: str) -> Path:
        """Where a finished image's record lies until it is merged."""
        return self._queue / f"{self.files[name]}.json"

    def _stored(self) -> dict[str, dict[str, Any]]:
        """The statistics there are of whole images."""
        if not self.statistics_path.exists():
            return {}
        found = {}
        for name, entry in _read_entries(self.statistics_path).items():
            prompt = self._prompts.get(name)
            if prompt is not None and entry.get("prompt") != prompt.text:
                raise UserError(
                    f"--output_dir {self.root}: image {name} has another prompt; give another folder"
                )
            if whole_png(self.png(name)):
                found[name] = entry
        return found

    def done(self, name: str) -> bool:
        """Whether an image is finished, by this process or another."""
        return name in self.statistics or (self._record(name).is_file() and whole_png(self.png(name)))

    def finished(self) -> dict[str, dict[str, Any]]:
        """Statistics of the prompts' finished images, in their order, as of the last merge."""
        return {name: self.statistics[name] for name in self._prompts if name in self.statistics}

    def add(self, decoded: Decoded, image: Image.Image, decode_s: float) -> None:
        """Keep a finished image: its PNG, then the record that declares it finished."""
        prompt = self._prompts[decoded.name]
        write_atomic(self.png(decoded.name), png_bytes(image))
        statistics = {
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
        self._queue.mkdir(exist_ok=True)
        record = {"statistics": statistics, "steps": [asdict(step) for step in decoded.steps]}
        write_atomic(self._record(decoded.name), json.dumps(record).encode())

    def merge(self) -> bool:
        """Put the records there are into the statistics and steps, both in the order of the prompts.

        Whether this completed the run. Interrupted anywhere, the next call does it all again.
        """
        with alone(self.root / LOCK):
            self.statistics = self._stored()
            waiting = {name: self._record(name) for name in self._prompts if self._record(name).is_file()}
            records = {
                name: _read_entries(path, "statistics", "steps")
                for name, path in waiting.items()
                if whole_png(self.png(name))
            }
            self.statistics |= {name: record["statistics"] for name, record in records.items()}
            self._write_steps({name: record["steps"] for name, record in records.items()})
            if records:
                write_json(self.statistics_path, {**self.finished(), **self.statistics})
            for path in waiting.values():
                path.unlink()
            with suppress(OSError):
                self._queue.rmdir()  # not while another window is in it
        return bool(waiting) and len(self.finished()) == len(self._prompts)

    def _write_steps(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Rewrite the steps if they change: those of other windows, then the finished images' in order."""
        stored = self.steps_path.read_bytes() if self.steps_path.exists() else b""
        before = stored.decode(errors="surrogateescape")  # bytes that are no text come back as they were
        own: dict[str, list[str]] = {name: [] for name in self._prompts}
        others = []
        for line in before.splitlines(keepends=True):
            name = _step(line).get("name") if line.endswith("\n") else None
            if name in own and name in self.statistics and name not in records:
                own[name].append(line)
            elif name is not None and name not in own:
                others.append(line)
        for name, steps in records.items():
            own[name] = [json.dumps({"name": name, **step}) + "\n" for step in steps]
        after = "".join(line for lines in (others, *own.values()) for line in lines)
        if after != before:
            write_atomic(self.steps_path, after.encode(errors="surrogateescape"))
