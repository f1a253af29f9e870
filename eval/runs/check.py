"""The check of a run's folder: which records, images and results are missing or damaged. No torch."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import starmap
from pathlib import Path

from PIL import Image

from adt_tree.errors import UserError
from eval.runs.prompts import DEFAULT_END, image_seed, load_prompts
from eval.runs.run_folder import SETTINGS, STEPS, RunFolder
from eval.runs.run_settings import FINGERPRINT
from models.checkpoint.files import read_json, reading

REMEDY = "delete it and run the same command again"


def stored_run(root: Path) -> tuple[RunFolder, int]:
    """Returns the run that a folder's stored options describe, and the seed of that run.

    Raises UserError if the folder holds no run of generate_images, or if the run's prompts cannot be read.
    """
    remedy = "give a folder of generate_images"
    settings = read_json(root / SETTINGS, remedy)
    with reading(root / SETTINGS, remedy):
        options = Namespace(**settings)
        window = (options.start_idx, options.end_idx or DEFAULT_END)
        return RunFolder(root, window, load_prompts(options), settings[FINGERPRINT]), options.random_seed


def faults(folder: RunFolder, run_seed: int) -> list[str]:
    """Returns one line for each file of a run that is missing or damaged: its path, the fault and the remedy.

    Every record and every pixel is read. The statistics and steps.jsonl are copies of the records. They are
    compared with the records only if all images are whole.
    """
    checks: list[tuple[Path, Callable[[], None]]] = []
    for name in folder.names:
        checks.append((folder.record_path(name), partial(check_record, folder, name, run_seed)))
        checks.append((folder.png(name), partial(check_png, folder.png(name))))
    results: list[tuple[Path, Callable[[], None]]] = [
        (folder.statistics_path, partial(check_statistics, folder)),
        (folder.root / STEPS, partial(check_steps, folder)),
    ]
    lines = list(filter(None, starmap(fault, checks)))
    return lines or list(filter(None, starmap(fault, results)))


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


def check_record(folder: RunFolder, name: str, run_seed: int) -> None:
    """Raises ValueError or UserError unless the record belongs to this prompt, run and seed, and its steps
    cover all codes from position 1 on."""
    record = folder.read(name)
    if record.statistics["seed"] != image_seed(run_seed, name):
        raise ValueError(f"seed {record.statistics['seed']} is not that of this prompt and --random_seed")
    position = 1
    for step in record.steps:
        if step["position"] != position:
            raise ValueError(f"no step has made the code at position {position}")
        position += step["accepted"] + 1
    if len(record.codes) != position:
        raise ValueError(f"{len(record.codes)} codes, but the steps made {position}")


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
