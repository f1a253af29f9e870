"""The method that a command line means: every combination of the published flags, compared with a stored
table.

The code of commit 2803594 wrote the table, without --drafter_type hybrid, which no longer exists; the lines
of glm_image came with that family. No command writes it, and it does not grow: families and methods that it
lacks are newer and are not compared. A difference is a change of behaviour. A refusal is stored as the option
that its message names first, a method as in outcome().
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from adt_tree.method import METHODS
from cli.generate_images import Options
from cli.method_options import method_from
from models.registry import SPECS

STORED = (Path(__file__).parent / "goldens" / "resolution.txt").read_text(encoding="utf-8").splitlines()
# The families and methods of the table, which trees() names one pair a line.
NAMED = {name for line in STORED if not line.startswith("--") for name in line.split()[:2]}
FAMILIES = [name for name in SPECS if name in NAMED]
SWITCHES = ("peanut", "lantern", "static_tree")
VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("eagle", "base"),
    "drafter_type": (None, "eagle", "self-draft", "sjd", "sjd-coupled", "sjd-pac", "none"),
    "eagle_version": (None, 1, 2),
    "verify": (None, "coupled", "rejection"),
    **dict.fromkeys(SWITCHES, (False, True)),
}


def outcome(values: dict[str, Any]) -> str:
    """Returns the method of the options (name, kind of tree, rule, LANTERN) or the option that is refused."""
    try:
        method = method_from(Options(**values))
    except UserError as error:
        return f"refused {str(error).split()[0].rstrip(':')}"
    tree = "static" if isinstance(method.tree, str) else type(method.tree).__name__
    # An AutoTree chooses a TreeShape while decoding, so it counts as one.
    tree = "TreeShape" if tree == "AutoTree" else tree
    return " ".join([method.name, tree, method.verify, *(["lantern"] if method.lantern else [])])


def flags(values: dict[str, Any]) -> str:
    """Returns the options as words of a command line."""
    chosen = [(name, value) for name, value in values.items() if value not in (None, False)]
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen)


def resolutions() -> Iterator[str]:
    """Yields a line per combination: the flags, then every outcome with the models that have it."""
    for chosen in product(*VALUES.values()):
        values = dict(zip(VALUES, chosen, strict=True))
        models: dict[str, list[str]] = defaultdict(list)
        for model in FAMILIES:
            models[outcome({"model": model, **values})].append(model)
        most = max(models, key=lambda resolution: len(models[resolution]))
        others = [
            f"{','.join(names)}: {resolution}" for resolution, names in models.items() if resolution != most
        ]
        yield " | ".join([flags(values), most, *others])


def trees() -> Iterator[str]:
    """Yields a line per model and method: its tree if the options do not change it."""
    for model, method in product(FAMILIES, METHODS):
        if method in NAMED:
            yield f"{model} {method} {SPECS[model].default_tree(method)}"


def test_every_combination_means_what_it_meant() -> None:
    assert [*resolutions(), *trees()] == STORED
