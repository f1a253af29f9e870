"""What is wrong with a model's files, part by part, from headers: the loaders run, and read no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models import registry
from models.errors import CheckpointError
from models.model import Extras
from models.neighbours import check_table, find_table


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model: where it was looked for and every fault found; none: it would load."""

    name: str
    place: str
    faults: list[str]
    note: str = ""


def inspect(model: str, model_path: str | None, drafter_path: str | None, extras: Extras) -> list[Part]:
    """Target (with codec and text side), drafter and table of nearest codes of a model named in the registry.

    A drafter or table that was not asked for and is not there is no fault: neither is needed. Hub ids are
    fetched.
    """
    home, drafter_home = registry.HOMES[model]
    parts = [Part("target", model_path or _shown(home), [])]
    try:
        loaded = registry.load(model, model_path, None, "fp32", "meta", False, extras)
    except CheckpointError as error:
        parts[0].faults.extend(error.faults)
        return [*parts, Part("drafter", drafter_path or _shown(drafter_home), [], "waits for the target")]
    beside = loaded.tables[0] / "drafter"
    place = drafter_path or str(beside if beside.is_dir() else drafter_home)
    drafter = Part(
        "drafter", _shown(Path(place)), [], "" if drafter_path or Path(place).exists() else "not there"
    )
    if not drafter.note:
        try:
            loaded = registry.load(model, model_path, drafter_path, "fp32", "meta", True, extras)
        except CheckpointError as error:
            drafter.faults.extend(error.faults)
    table = find_table(loaded.tables, loaded.num_codes)
    nearest = Part(
        "table", _shown(table) if table else "-", [], "" if table else "computed from the codebook"
    )
    if table is not None:
        try:
            check_table(table, loaded.num_codes)
        except CheckpointError as error:
            nearest.faults.extend(error.faults)
    return [*parts, drafter, nearest]


def _shown(path: Path) -> str:
    """A path as the user writes it: from the repository's root where it lies in there."""
    root = registry.CKPTS.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
