"""The check of a run's folder: which records, images and results are missing or damaged. No torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
from PIL import Image

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from models.checkpoint.files import read_json, reading
from storage.prompts import DEFAULT_END, image_seed, load_prompts
from storage.run_folder import SETTINGS, RunFolder
from storage.store import FINGERPRINT

REMEDY = "delete it and run the same command again"
NO_RUN = "give a folder of generate_images"


def stored_options(root: Path) -> Namespace:
    """Returns the options of the run in a folder. Raises UserError if it holds no run of generate_images."""
    settings = read_json(root / SETTINGS, NO_RUN)
    with reading(root / SETTINGS, NO_RUN):
        # Earlier versions made one image of every prompt.
        return Namespace(**({"seeds": 1} | settings))


def stored_run(root: Path, options: Namespace) -> RunFolder:
    """Returns the run of these options in a folder. Raises UserError if its prompts cannot be read."""
    with reading(root / SETTINGS, NO_RUN):
        window = (options.start_idx, options.end_idx or DEFAULT_END)
        return RunFolder(root, window, load_prompts(options), getattr(options, FINGERPRINT))


def faults(folder: RunFolder, grid: Grid) -> list[str]:
    """Returns one line for each file of a run that is missing or damaged: its path, the fault and the remedy.

    Every record and every pixel is read. Codes of a run without pixels, and files that are derived from the
    records, are compared with records that are whole.
    """
    lines: list[str | None] = []
    for name in folder.prompts:
        record = fault(folder.record_path(name), partial(check_record, folder, name, grid))
        png, codes = folder.png(name), folder.codes_path(name)
        lines.append(record)
        if png.is_file() or not codes.is_file():
            lines.append(fault(png, partial(check_png, png)))
        elif record is None:
            lines.append(fault(codes, partial(check_codes, folder, name)))
    if not any(lines):
        lines += [fault(path, partial(check_lines, path, expected)) for path, expected in folder.derived()]
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


def check_record(folder: RunFolder, name: str, grid: Grid) -> None:
    """Raises ValueError or UserError unless the record belongs to this prompt, run and seed, and its steps
    follow one another and made as many cells as the run's images have."""
    record = folder.read(name)
    if record.statistics["seed"] != image_seed(folder.store.fingerprint["random_seed"], name):
        raise ValueError(f"seed {record.statistics['seed']} is not that of this prompt and --random_seed")
    position = 1
    for step in record.steps:
        if step["position"] != position:
            raise ValueError(f"no step has made the cell at position {position}")
        position += step["accepted"] + 1
    if (len(record.codes), position) != (grid.size, grid.length):
        raise ValueError(
            f"{len(record.codes)} codes and steps of {position} cells: an image of this run has {grid.size} "
            f"and {grid.length}"
        )


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


def check_lines(path: Path, expected: Iterator[str]) -> None:
    """Raises ValueError unless a file has exactly these lines."""
    with path.open(encoding="utf-8") as stored:
        if any(line != other for line, other in zip_longest(stored, expected)):
            raise ValueError("is not what follows from the records")
