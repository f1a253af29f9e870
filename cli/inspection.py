"""Names every fault in a model's files. The loaders run on headers alone, so no weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from models.codecs.nearest_codes import find_table, open_table
from models.family import LoadOptions
from models.loading import drafter_folder, find_target, load
from models.published import CKPTS
from models.registry import spec_of


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a model: target, drafter or table. It can be loaded if it has no faults."""

    name: str
    place: str  # the path or hub id that was checked
    note: str = ""  # the reason if it was not checked
    faults: list[str] = field(default_factory=list)

    def check(self, load: Callable[[], Any]) -> Any:
        """Returns the result of load(). If it raises CheckpointError, stores its faults and returns None."""
        try:
            return load()
        except CheckpointError as error:
            self.faults.extend(error.faults)
            return None


def inspect(model: str, options: LoadOptions) -> list[Component]:
    """Checks a family's target (with its codec and prompts), drafter and table of nearest codes.

    No family needs a drafter or a table, so a missing one is a fault only if the options name it. Hub ids are
    fetched. Raises CheckpointError for an unknown family.
    """
    spec, drafter_path = spec_of(model), options.drafter_path
    headers = replace(options, device="meta", precision="fp32", need_drafter=False)
    target = Component("target", options.model_path or _shown(spec.target_folder))
    loaded = target.check(lambda: load(model, headers))
    if loaded is None:
        place = drafter_path or _shown(spec.drafter_folder)
        return [target, Component("drafter", place, "not checked: repair the target first")]
    path = drafter_path or drafter_folder(spec, find_target(spec, options), options)
    drafter = Component("drafter", _shown(Path(path or spec.drafter_folder)), "" if path else "not there")
    if not drafter.note:
        loaded = drafter.check(lambda: load(model, replace(headers, need_drafter=True))) or loaded
    table_path = find_table(loaded.tables, loaded.num_codes)
    if table_path is None:
        return [target, drafter, Component("table", "-", "computed from the codebook")]
    table = Component("table", _shown(table_path))
    table.check(lambda: open_table(table_path, loaded.num_codes))
    return [target, drafter, table]


def _shown(path: Path) -> str:
    """Returns a path as the user would write it: from the repository's root if it lies in there."""
    root = CKPTS.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
