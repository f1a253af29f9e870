"""docs/RESULTS.md: the tables that a reader looks for, from stored results of bench. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import tables
from eval.columns import LEGEND

OPENING = f"""# Results

Written by `python main.py report --write docs/RESULTS.md` from docs/results/*.json; edit neither by hand.
`python main.py report FILE` prints any result of bench in that folder in full.

{LEGEND}

Results measured before 2026-11-29 have intervals over images instead of prompts.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the document: a table or a picture."""

    title: str
    files: str  # pattern of the names of the results that it shows
    index: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    across: str = "temperature"
    picture: str = ""  # a file beside the document, in place of a table


SECTIONS = (
    Section("All methods", "bench.json", ("method",), ("tau", "SR", "projected", "nll", "nll_over_ar")),
    Section("Quality", "quality.json", ("method",), ("nll", "nll_over_ar", "recognised")),
    Section(
        "Images per minute by the nodes of self-drafted trees",
        "sizes_*.json",
        ("temperature", "batch_size"),
        ("images_per_min",),
        "total_token",
    ),
    Section(
        "Codes per target call of methods without a drafter, by the nodes of their trees (T = 1)",
        "rivals.json",
        ("method", "seed_cells"),
        ("tau",),
        "total_token",
    ),
    Section("Quality against speed, one image", "frontier.json", picture="frontier.png"),
    Section("Quality against speed, 16 images in flight", "frontier_16.json", picture="frontier_16.png"),
)


def document(results: Mapping[Path, Mapping[str, Any]]) -> str:
    """Returns docs/RESULTS.md. results: by their paths. A section without results is left out."""
    parts = [OPENING]
    for section in SECTIONS:
        chosen = [result for path, result in results.items() if path.match(section.files)]
        if chosen:
            parts += [f"## {section.title}\n", f"{body(section, chosen)}\n"]
    return "\n".join(parts)


def body(section: Section, results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a section's table or picture, and how to repeat each of its results."""
    notes = "\n".join(f"- {tables.note(result)}" for result in results)
    if section.picture:
        return f"![{section.title}]({section.picture})\n\n{notes}"
    rows = [row for result in results for row in result["rows"]]
    sizes = "method" not in section.index
    if sizes:  # the AR baseline has no tree: it stands beside the sizes
        rows = [row | {"total_token": "ar"} if row["method"] == "ar" else row for row in rows]
    elif section.across == "total_token":
        rows = [row for row in rows if row["method"] != "ar"]
    lines = tables.lines_of(rows, section.index, section.values, section.across)
    return f"{tables.table(lines)}\n\n{notes}"
