"""The check of a run's folder: which records, images and results are missing or damaged. No torch."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from adt_tree.errors import UserError
from eval.runs.prompts import DEFAULT_END, image_seed, load_prompts
from eval.runs.run_folder import IMAGE_CODES, SETTINGS, STEPS, RunFolder
from eval.runs.run_settings import FINGERPRINT
from models.checkpoint.files import read_json, reading

REMEDY = "delete it and run the same command again"


class StoredRun(NamedTuple):
    """A run and what its stored options say about its images."""

    folder: RunFolder
    seed: int  # --random_seed
    codes: int | None  # number of codes of an image; None if an earlier version made the run


def stored_run(root: Path) -> StoredRun:
    """Returns the run that a folder's stored options describe.

    Raises UserError if the folder holds no run of generate_images, or if the run's prompts cannot be read.
    """
    remedy = "give a folder of generate_images"
    settings = read_json(root / SETTINGS, remedy)
    with reading(root / SETTINGS, remedy):
        options = Namespace(**settings)
        window = (options.start_idx, options.end_idx or DEFAULT_END)
        folder = RunFolder(root, window, load_prompts(options), settings[FINGERPRINT])
        return StoredRun(folder, options.random_seed, settings.get(IMAGE_CODES))


def faults(run: StoredRun) -> list[str]:
    """Returns one line for each file of a run that is missing or damaged: its path, the fault and the remedy.

    Every record and every pixel is read. The statistics, steps.jsonl and the codes of a run without pixels
    are copies of the records. They are compared only with records that are whole.
    """
    folder, lines = run.folder, list[str | None]()
    for name in folder.names:
        record = fault(folder.record_path(name), partial(check_record, run, name))
        png, codes = folder.png(name), folder.codes_path(name)
        lines.append(record)
        if png.is_file() or not codes.is_file():
            lines.append(fault(png, partial(check_png, png)))
        elif record is None:
            lines.append(fault(codes, partial(check_codes, folder, name)))
    if not any(lines):
        lines.append(fault(folder.statistics_path, partial(check_statistics, folder)))
        lines.append(fault(folder.root / STEPS, partial(check_steps, folder)))
    return list(filter(None, lines))


def fault(path: Path, check: Callable[[], None]) -> str | None:
    """Returns what is wrong with a file; None if it is there and passes its check."""
    if not path.is_file():
        return f"{path}: is missing: run the same command again"
    try:
        with reading(path, REMEDY):
            check()
    except UserError as error:
        return str(error)
    return None


def check_record(run: StoredRun, name: str) -> None:
    """Raises ValueError or UserError unless the record belongs to this prompt, run and seed, has as many
    codes as the run's images, and its steps cover all of them from position 1 on."""
    record = run.folder.read(name)
    if record.statistics["seed"] != image_seed(run.seed, name):
        raise ValueError(f"seed {record.statistics['seed']} is not that of this prompt and --random_seed")
    position = 1
    for step in record.steps:
        if step["position"] != position:
            raise ValueError(f"no step has made the code at position {position}")
        position += step["accepted"] + 1
    if len(record.codes) != position:
        raise ValueError(f"{len(record.codes)} codes, but the steps made {position}")
    if run.codes not in (None, position):
        raise ValueError(f"{position} codes, but the images of this run have {run.codes}")


def check_codes(folder: RunFolder, name: str) -> None:
    """Raises ValueError unless the file of codes holds those of the record as int64."""
    stored = np.load(folder.codes_path(name))
    if stored.dtype != np.int64 or stored.tolist() != folder.read(name).codes:
        raise ValueError("does not hold the codes of the record")


def check_png(path: Path) -> None:
    """Raises Pillow's error if a checksum of a PNG is wrong or one of its pixels cannot be read."""
    with Image.open(path, formats=("PNG",)) as image:
        image.verify()  # the checksums, after which the file has to be opened again
    with Image.open(path, formats=("PNG",)) as image:
        image.load()


def check_statistics(folder: RunFolder) -> None:
    """Raises ValueError unless the statistics are those of the records, in the order of the prompts."""
    stored, records = read_json(folder.statistics_path), folder.statistics()
    if list(stored) != list(records) or stored != records:
        raise ValueError("does not hold the statistics of the records")


def check_steps(folder: RunFolder) -> None:
    """Raises ValueError unless steps.jsonl has as many steps of each image as its record."""
    with (folder.root / STEPS).open(encoding="utf-8") as lines:
        counts = Counter(json.loads(line)["name"] for line in lines)
    for name in folder.names:
        if counts[name] != len(folder.read(name).steps):
            raise ValueError(f"has {counts[name]} steps of image {name}, not {len(folder.read(name).steps)}")
