"""The folder of generate_images. No torch.

    generation_configs.json       the settings of the store (storage.store), and the rasters of an image
    records/NAME.json             an image's codes, statistics (its seed among them) and steps
    img/NAME.png                  its pixels
    codes/NAME.npy                where no pixels can be made: the codes as int64 [codes]
    steps.jsonl                   the steps of all finished images, one line per target call
    global_statistics_A_B.json    the statistics of the prompts A to B

An image's record is written before its pixels are decoded, so that codes are never lost: an image is finished
when its record and its PNG exist or, in a run that can make no pixels, its file of codes. A later run that
can make them does so from the record. The last two files are derived from the records when all images are
finished. An image depends on its own prompt and seed alone, so processes may share a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from adt_tree.records import Decoded
from models.checkpoint.files import make_folder, read_json, reading, replacing, write_atomic
from storage.prompts import Prompt
from storage.store import Store, read_record

MAX_NAME_LENGTH = 100  # characters of the prompt's name that a file name takes
IMAGES, CODES, RECORDS, STEPS = "img", "codes", "records", "steps.jsonl"
SETTINGS, STATISTICS = "generation_configs.json", "global_statistics_{}_{}.json"
RASTERS = "rasters"  # key of SETTINGS beside the options: the rasters of an image, as raster_rows gives them


def file_name(name: str) -> str:
    """Returns a prompt's name as a file name: unchanged where it is harmless, else cleaned and made unique by
    a hash."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-")[:MAX_NAME_LENGTH]
    if clean == name:
        return name
    return f"{clean}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def png_bytes(image: Image.Image) -> bytes:
    """Returns a PNG without metadata, so that the same pixels give the same bytes."""
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


@dataclass(slots=True)
class ImageRecord:
    """The contents of records/NAME.json."""

    name: str
    codes: list[int]  # in raster order
    statistics: dict[str, Any]  # the image's entry of global_statistics_A_B.json
    steps: list[dict[str, Any]]  # adt_tree.records.Step as dictionaries
    run: str = ""  # the store's digest

    @classmethod
    def of(cls, path: Path, content: dict[str, Any]) -> ImageRecord:
        """Returns the record that a file holds. Raises UserError if it is damaged."""
        with reading(path, "delete it, and its image is generated again"):
            record = cls(**content)
            whole = isinstance(record.name, str) and isinstance(record.statistics["prompt"], str)
            whole &= all(isinstance(code, int) for code in record.codes)
            if not whole or not all(isinstance(step, dict) for step in record.steps):
                raise ValueError("is not the record of an image")
        return record


def finished_records(root: Path) -> list[Path]:
    """Returns the records of the finished images in a run's folder, in the order of their names, 2 before
    10."""
    paths = sorted((root / RECORDS).glob("*.json"), key=lambda path: (len(path.name), path.name))
    return [path for path in paths if has_result(root, path.stem)]


def has_result(root: Path, stem: str) -> bool:
    """Returns whether a run's folder holds the pixels of an image or, where there are none, its codes."""
    return (root / IMAGES / f"{stem}.png").is_file() or (root / CODES / f"{stem}.npy").is_file()


def read_records(root: Path) -> Iterator[ImageRecord]:
    """Yields the records of the finished images in a run's folder."""
    for path in finished_records(root):
        yield ImageRecord.of(path, read_record(path))


def read_statistics(root: Path) -> dict[str, dict[str, Any]]:
    """Returns the statistics of the finished images in a folder, by name. Raises UserError if there are none.

    They come from the records. Images that a statistics file names come first, in its order, which is that
    of the prompts; the others, whose run is not complete, follow. Folders of the released code have only
    statistics files, which are then returned as they are.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(root.glob(STATISTICS.format("*", "*")), key=lambda path: (len(path.name), path.name)):
        remedy = "delete it, or choose another folder"
        content = read_json(path, remedy)
        with reading(path, remedy):
            if not all(isinstance(entry, dict) for entry in content.values()):
                raise ValueError("is not a file of statistics")
        files |= content
    finished = {record.name: record.statistics for record in read_records(root)}
    statistics = {name: finished[name] for name in files if name in finished} | finished or files
    if not statistics:
        raise UserError(f"{root} holds no statistics of images: give a folder of generate_images")
    return statistics


def raster_rows(grid: Grid) -> list[tuple[int, int, bool]]:
    """Returns height, width and row_ends of each raster of an image, as SETTINGS stores them."""
    return [astuple(raster) for raster in grid.rasters]


def stored_grid(root: Path) -> Grid:
    """Returns the grid of the images in a run's folder. Raises UserError if its settings do not hold it."""
    remedy = "delete it and run the same command again"
    settings = read_json(root / SETTINGS, remedy)
    with reading(root / SETTINGS, remedy):
        *before, (height, width, row_ends) = settings[RASTERS]
        return Grid(height, width, tuple(Raster(*raster) for raster in before), row_ends)


def tau_of(entries: Collection[Mapping[str, Any]]) -> float:
    """Returns codes per target call over the images of these statistics. Every call counts alike, so that an
    image of many calls weighs more."""
    calls = sum(entry["target_calls"] for entry in entries)
    return sum(entry["acceptance_length"] * entry["target_calls"] for entry in entries) / max(calls, 1)


class RunFolder:
    """The folder of one run: knows which of its images are finished, and stores the others."""

    def __init__(
        self,
        root: Path,
        window: tuple[int, int],
        prompts: Sequence[Prompt],
        fingerprint: Mapping[str, Any],
        pixels: bool = True,
    ) -> None:
        """Looks at the folder; nothing is written before start().

        window: --start_idx and --end_idx, which selected the prompts. fingerprint: everything that changes an
        image or its record. pixels: whether this run makes them; if not, its codes finish an image. Raises
        UserError if two names give one file, or if the folder holds another run.
        """
        self.root, self._pixels = root, pixels
        self.statistics_path = root / STATISTICS.format(*window)
        self.prompts = {prompt.name: prompt for prompt in prompts}
        files: dict[str, str] = {}
        for name in self.prompts:
            other = files.setdefault(file_name(name).lower(), name)
            if other != name:
                raise UserError(
                    f"prompt names {other[:80]!r} and {name[:80]!r} give the same file "
                    f"{file_name(name)}.png: rename one"
                )
        self.store = Store(root / SETTINGS, RECORDS, fingerprint)

    def check_records(self) -> None:
        """Reads the records that there are. Raises UserError for the first that is damaged or of another
        run."""
        for name in self.prompts:
            if self.has_record(name):
                self.read(name)

    def start(self, options: Mapping[str, Any]) -> None:
        """Makes the folder. options: the parsed command line and the rasters of an image, stored as they
        are."""
        make_folder(self.root / IMAGES)
        self.store.start(options)

    def png(self, name: str) -> Path:
        """Returns the path of an image."""
        return self.root / IMAGES / f"{file_name(name)}.png"

    def codes_path(self, name: str) -> Path:
        """Returns the path of an image's codes, of a run without pixels."""
        return self.root / CODES / f"{file_name(name)}.npy"

    def record_path(self, name: str) -> Path:
        """Returns the path of an image's record."""
        return self.store.path(file_name(name))

    def has_record(self, name: str) -> bool:
        """Returns whether this or another process has generated the codes of an image."""
        return self.record_path(name).is_file()

    def is_finished(self, name: str) -> bool:
        """Returns whether an image has its record and its pixels, or its codes where no pixels are made."""
        result = self.png(name).is_file() if self._pixels else has_result(self.root, file_name(name))
        return result and self.has_record(name)

    @property
    def complete(self) -> bool:
        """True if all images of this run are finished."""
        return all(map(self.is_finished, self.prompts))

    def read(self, name: str) -> ImageRecord:
        """Reads an image's record. Raises UserError if it is damaged or belongs to another prompt or run."""
        path = self.record_path(name)
        record = ImageRecord.of(path, self.store.read(path.stem))
        if record.statistics["prompt"] != self.prompts[name].text:
            raise UserError(f"{path}: made from another prompt; give another --output_dir")
        return record

    def add(self, decoded: Decoded) -> None:
        """Stores the record of an image whose pixels are still to be decoded."""
        prompt = self.prompts[decoded.name]
        statistics = {
            "prompt": prompt.text,
            "acceptance_length": decoded.tau,
            "step_compression": decoded.tau,
            "time": decoded.seconds,
            "latency": decoded.seconds,
            "ann_id": prompt.number,
            **dict(prompt.facts),
            "seed": decoded.seed,
            "target_calls": decoded.target_calls,
            "drafter_calls": decoded.drafter_calls,
            "mean_depth": decoded.mean_depth,
            "mean_nodes": decoded.mean_nodes,
            **({"warnings": decoded.warnings} if decoded.warnings else {}),
        }
        steps = [step.as_dict() for step in decoded.steps]
        self._write(ImageRecord(decoded.name, decoded.codes, statistics, steps))

    def finish_codes(self, record: ImageRecord) -> None:
        """Stores the codes of an image of which no pixels can be made."""
        path = self.codes_path(record.name)
        make_folder(path.parent)
        stream = io.BytesIO()
        np.save(stream, np.array(record.codes, dtype=np.int64))
        write_atomic(path, stream.getvalue())

    def finish(self, record: ImageRecord, image: Image.Image, seconds: float) -> None:
        """Stores an image's pixels, which took `seconds` to decode. That time goes into the record first, so
        that the record of a finished image is complete."""
        record.statistics["time"] = record.statistics["latency"] + seconds
        self._write(record)
        write_atomic(self.png(record.name), png_bytes(image))

    def _write(self, record: ImageRecord) -> None:
        self.store.write(file_name(record.name), asdict(record))

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of all images, in the order of the prompts. The run must be complete."""
        return {name: self.read(name).statistics for name in self.prompts}

    def derived(self) -> Iterator[tuple[Path, Iterator[str]]]:
        """Yields the files that are derived from the records, each with its lines, the statistics last."""
        steps = ({"name": record.name, **step} for record in read_records(self.root) for step in record.steps)
        yield self.root / STEPS, (json.dumps(step) + "\n" for step in steps)
        # Lone surrogates, which UTF-8 cannot encode, become JSON's notation for them.
        text = json.dumps(self.statistics(), indent=1, ensure_ascii=False) + "\n"
        yield self.statistics_path, io.StringIO(text.encode(errors="backslashreplace").decode())

    def write_results(self) -> bool:
        """Writes the derived files of a complete run, the statistics last of all.

        Returns whether the statistics changed; they do not if another process has written them already.
        """
        before = self.statistics_path.read_bytes() if self.statistics_path.exists() else None
        while True:
            finished = finished_records(self.root)
            for path, lines in self.derived():
                with replacing(path) as part, part.open("w", encoding="utf-8") as stream:
                    stream.writelines(lines)
            # In the meantime another process may have finished an image and written the steps without ours.
            if finished == finished_records(self.root):
                break
        return self.statistics_path.read_bytes() != before
