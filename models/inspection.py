"""What is wrong with a model's files, part by part, from headers: the loaders run, and read no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from adt_tree.errors import CheckpointError
from models.codecs.neighbours import check_table, find_table
from models.loading import drafter_folder, find_target, load
from models.registry import spec_of
from models.spec import CKPTS, LoadOptions


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model: where it was looked for and every fault found; none: it would load."""

    name: str
    place: str
    faults: list[str]
    note: str = ""


def inspect(model: str, options: LoadOptions) -> list[Part]:
    """Target (with codec and text side), drafter and table of nearest codes of a family's checkpoint.

    A drafter or table that was not asked for and is not there is no fault: neither is needed. Hub ids are
    fetched.
    """
    spec = spec_of(model)
    headers = replace(options, device="meta", precision="fp32", need_drafter=False, alignment="published")
    target = Part("target", options.model_path or _shown(spec.target_folder), [])
    given = options.drafter_path
    try:
        loaded = load(model, headers)
    except CheckpointError as error:
        target.faults.extend(error.faults)
        waits = Part("drafter", given or _shown(spec.drafter_folder), [], "waits for the target")
        return [target, waits]
    folder = find_target(spec, options)
    place = Path(given) if given else drafter_folder(spec, folder)
    drafter = Part("drafter", _shown(place), [], "" if given or place.exists() else "not there")
    if not drafter.note:
        try:
            loaded = load(model, replace(headers, need_drafter=True))
        except CheckpointError as error:
            drafter.faults.extend(error.faults)
    table = find_table(loaded.tables, loaded.num_codes)
    if table is None:
        return [target, drafter, Part("table", "-", [], "computed from the codebook")]
    nearest = Part("table", _shown(table), [])
    try:
        check_table(table, loaded.num_codes)
    except CheckpointError as error:
        nearest.faults.extend(error.faults)
    return [target, drafter, nearest]


def _shown(path: Path) -> str:
    """A path as the user writes it: from the repository's root where it lies in there."""
    root = CKPTS.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
