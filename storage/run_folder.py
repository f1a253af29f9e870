"""The folder of generate_images. No torch.

    generation_configs.json       the settings of the store (storage.store), and IMAGE
    records/NAME.json             an image's codes, statistics (its seed among them) and steps
    img/NAME.png                  its pixels
    global_statistics_A_B.json    as the released code writes it: the statistics of the prompts A to B

An image's record is written before its pixels are decoded, so that codes are never lost: an image is finished
when it has its record and, in a run that makes pixels, its PNG. A later run makes the pixels of a run without
them from the records. The statistics are written for other programs once all images are finished, and not
read again. An image depends on its own prompt and seed alone, so processes may share a folder.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from adt_tree.errors import CheckpointError, UserError
from adt_tree.grid import Grid, Raster
from adt_tree.records import Decoded
from models.checkpoint.files import read_json, reading, write_atomic
from storage.prompt_settings import PromptSettings
from storage.prompts import Prompt, image_seed, is_stream, load_prompts
from storage.store import FINGERPRINT, REMEDY, Store

MAX_NAME_LENGTH = 100  # characters of the prompt's name that a file name takes
IMAGES, RECORDS = "img", "records"
SETTINGS, STATISTICS = "generation_configs.json", "global_statistics_{}_{}.json"
IMAGE = "image"  # key of SETTINGS beside the options: the rasters of an image, and whether it has pixels
NO_RUN = "give a folder of generate_images"


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
    def of(cls, path: Path, content: Any) -> ImageRecord:
        """Returns the record that a file holds. Raises CheckpointError if it is damaged."""
        with reading(path, REMEDY):
            record = cls(**content)
            whole = isinstance(record.name, str) and isinstance(record.statistics["prompt"], str)
            whole &= all(isinstance(code, int) for code in record.codes)
            if not whole or not all(isinstance(step, dict) for step in record.steps):
                raise ValueError("is not the record of an image")
        return record


def read_records(root: Path) -> Iterator[ImageRecord]:
    """Yields the records of the finished images in a run's folder, in the order of their names, 2 before
    10."""
    images = {path.stem for path in (root / IMAGES).glob("*.png")}  # none in a run without pixels
    for path in sorted((root / RECORDS).glob("*.json"), key=lambda path: (len(path.name), path.name)):
        if path.stem in images or not images:
            yield ImageRecord.of(path, read_json(path, REMEDY))


def read_statistics(root: Path) -> dict[str, dict[str, Any]]:
    """Returns the statistics of the finished images in a folder, by name, from their records. A folder of the
    released code has only files of statistics, which are then returned as they are. Raises UserError if there
    are none."""
    statistics = {record.name: record.statistics for record in read_records(root)}
    for path in [] if statistics else sorted(root.glob(STATISTICS.format("*", "*"))):
        remedy = "delete it, or choose another folder"
        content = read_json(path, remedy)
        with reading(path, remedy):
            if not all(isinstance(entry, dict) for entry in content.values()):
                raise ValueError("is not a file of statistics")
        statistics |= content
    if not statistics:
        raise UserError(f"{root} holds no statistics of images: give a folder of generate_images")
    return statistics


def stored_options(root: Path) -> dict[str, Any]:
    """Returns the options of the run of generate_images in a folder. Raises UserError if there is none."""
    with reading(root / SETTINGS, NO_RUN):
        return {**read_json(root / SETTINGS, NO_RUN)}


def stored_grid(root: Path) -> Grid:
    """Returns the grid of the images in a run's folder. Raises UserError if its settings do not hold it."""
    settings = stored_options(root)
    with reading(root / SETTINGS, NO_RUN):
        *before, (height, width, row_ends) = settings[IMAGE]["rasters"]
        return Grid(height, width, tuple(Raster(*raster) for raster in before), row_ends)


def stored_run(root: Path, options: Mapping[str, Any]) -> RunFolder:
    """Returns the run of these options in a folder. Raises UserError if its prompts cannot be read."""
    with reading(root / SETTINGS, NO_RUN):
        if is_stream(options["prompt"] or ""):
            raise UserError(f"{root}: its prompts came by {options['prompt']}, which cannot be read again")
        prompts, grid = load_prompts(PromptSettings.of(options)), stored_grid(root)
        return RunFolder(root, prompts, options[FINGERPRINT], grid, pixels=options[IMAGE]["pixels"])


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
        prompts: Sequence[Prompt],
        fingerprint: Mapping[str, Any],
        grid: Grid,
        num_codes: int | None = None,
        pixels: bool = True,
    ) -> None:
        """Looks at the folder; nothing is written before start().

        fingerprint: everything that changes an image or its record. num_codes: of the codebook; None: not
        known. pixels: whether this run makes them. Raises UserError if two names give one file, or if the
        folder holds another run.
        """
        self.root, self.grid, self._num_codes, self._pixels = root, grid, num_codes, pixels
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
        self._damaged = set[Path]()  # files that count as missing

    def faults(self, names: Iterable[str]) -> Iterator[tuple[Path, UserError]]:
        """Yields each missing or damaged record and picture of these images, and what is wrong with it.

        The error of a file that is damaged, or not there, is a CheckpointError; that of a record of another
        run or prompt is not. Every record and every byte of the pictures is read.
        """
        for name in names:
            for path, check in ((self.record_path(name), self.read), (self.png(name), self.check_png)):
                try:
                    check(name)
                except UserError as error:
                    yield path, error

    def forget_damaged(self, names: Iterable[str]) -> list[Path]:
        """Returns the damaged files of these images, which from now on count as missing. Raises UserError for
        a record of another run or prompt."""
        for path, error in self.faults(names):
            if not isinstance(error, CheckpointError):
                raise error
            if path.exists():
                self._damaged.add(path)
        return sorted(self._damaged)

    def start(self, options: Mapping[str, Any]) -> None:
        """Makes the folder. options: the parsed command line, which is stored."""
        (self.root / IMAGES).mkdir(parents=True, exist_ok=True)
        rasters = [astuple(raster) for raster in self.grid.rasters]
        self.store.start({**options, IMAGE: {"rasters": rasters, "pixels": self._pixels}})

    def png(self, name: str) -> Path:
        """Returns the path of an image."""
        return self.root / IMAGES / f"{file_name(name)}.png"

    def record_path(self, name: str) -> Path:
        """Returns the path of an image's record."""
        return self.store.path(file_name(name))

    def _is_whole(self, path: Path) -> bool:
        return path.is_file() and path not in self._damaged

    def has_record(self, name: str) -> bool:
        """Returns whether this or another process has generated the codes of an image."""
        return self._is_whole(self.record_path(name))

    def is_finished(self, name: str) -> bool:
        """Returns whether an image has its record and, if this run makes them, its pixels."""
        return self.has_record(name) and (not self._pixels or self._is_whole(self.png(name)))

    @property
    def complete(self) -> bool:
        """True if all images of this run are finished."""
        return all(map(self.is_finished, self.prompts))

    def read(self, name: str) -> ImageRecord:
        """Returns an image's record. Raises CheckpointError if it is damaged, with other codes or another
        seed than an image of this name has, and UserError if it belongs to another prompt or run."""
        path, text = self.record_path(name), self.prompts[name].text
        record = ImageRecord.of(path, self.store.read(path.stem))
        stored = record.statistics["prompt"]
        if stored != text:
            raise UserError(f"{path}: made from another prompt, {stored[:80]!r}; give another output_dir")
        with reading(path, REMEDY):
            if record.statistics["seed"] != image_seed(self.store.fingerprint["random_seed"], name):
                raise ValueError(f"seed {record.statistics['seed']} is not that of this prompt and run")
            cells = 1 + sum(step["accepted"] + 1 for step in record.steps)
            if (len(record.codes), cells) != (self.grid.size, self.grid.length):
                raise ValueError(f"{len(record.codes)} codes and steps of {cells} cells are no image")
            if not all(0 <= code < (self._num_codes or math.inf) for code in record.codes):
                raise ValueError("a code is none of the model's")
        return record

    def check_png(self, name: str) -> None:
        """Raises CheckpointError if this run makes pixels and those of an image are missing or damaged."""
        path = self.png(name)
        if self._pixels:
            with reading(path, REMEDY), Image.open(path, formats=("PNG",)) as image:
                image.verify()  # the checksums of all its parts

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

    def finish(self, record: ImageRecord, image: Image.Image, seconds: float) -> None:
        """Stores an image's pixels, which took `seconds` to decode. That time goes into the record first, so
        that the record of a finished image is complete."""
        record.statistics["time"] = record.statistics["latency"] + seconds
        self._write(record)
        write_atomic(self.png(record.name), png_bytes(image))
        self._damaged.discard(self.png(record.name))

    def _write(self, record: ImageRecord) -> None:
        self.store.write(file_name(record.name), asdict(record))
        self._damaged.discard(self.record_path(record.name))

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of all images, in the order of the prompts. The run must be complete."""
        return {name: self.read(name).statistics for name in self.prompts}
