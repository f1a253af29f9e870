"""The results of load_test: a file with one row per test, and their table. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import tables
from models.checkpoint.files import make_folder, read_json, reading, write_json

STORED = "load.json"
ROWS = "tests"  # key of the file
Row = Mapping[str, Any]
LEGEND = (
    "N clients: each sends a request when its last one has ended; N per s: requests arrive at random, "
    "whether earlier ones have ended or not; generate_images: no service, as many images in flight as "
    "slots; partial: partial images of each request; refused: answered by 429. Seconds from the request to "
    "the first picture, and to the image: 50th, 90th and 99th percentile."
)


def add(path: Path, row: Row) -> None:
    """Adds a row to a file of results. Creates the file if it does not exist."""
    rows = read(path) if path.exists() else []
    make_folder(path.parent)
    write_json(path, {ROWS: [*rows, row]})


def is_load(path: Path) -> bool:
    """Returns whether a file that can be read holds results of load_test."""
    content = read_json(path, f"give a {STORED} of load_test, or a {tables.STORED} of bench")
    return isinstance(content, dict) and ROWS in content


def read(path: Path) -> list[Row]:
    """Returns the rows of a file. Raises UserError if it is damaged."""
    remedy = "delete it and run load_test again"
    content = read_json(path, remedy)
    with reading(path, remedy):
        text_of(content[ROWS])  # fails if a value that a table needs is missing
    return content[ROWS]


def times(row: Row, name: str) -> str:
    """Returns percentiles of seconds as one cell, or "-" if the test has none."""
    return (
        " / ".join(f"{row[f'{name}_p{part}']:.1f}" for part in (50, 90, 99)) if f"{name}_p50" in row else "-"
    )


def checks(row: Row) -> str:
    """Returns sentences on what a test found besides times: requests that failed, images that differ, memory
    of the service. "" if it looked at none of these."""
    ends = (("cancelled", "were cancelled"), ("failed", "failed"))
    text = "".join(f" {row[name]} requests {what}." for name, what in ends if row.get(name))
    if "compared" in row:
        text += f" {row['compared']} images were compared with those of Pipeline, {row['different']} differ."
    if "held" in row:
        parts = [f"{held['rss'] / 1e6:.0f} MB, {held['files']} files, {held['threads']} threads"
                 for held in row["held"]]  # fmt: skip
        text += f" The service held {parts[0]} after a quarter of the requests, and {parts[1]} at the end."
    return text


def text_of(rows: Sequence[Row]) -> str:
    """Returns rows as Markdown: the table, and how to repeat it."""
    head = [
        "methods",
        "slots",
        "requests",
        "arrive",
        "partial",
        "images",
        "refused",
        "images/min",
        "s to the first",
        "s to the image",
    ]
    table = [head]
    for row in rows:
        numbers = [str(row["images"]), str(row.get("refused", "-")), f"{row['images_per_min']:.1f}"]
        cells = [", ".join(row["methods"]), str(row["slots"]), str(row["requests"]), row["arrivals"]]
        cells += [str(row["partial_images"]), *numbers]
        table.append([*cells, times(row, "first"), times(row, "image")])
    lines = dict.fromkeys(
        f"`{row['command']}`, {tables.origin(row['environment'])}.{checks(row)}" for row in rows
    )
    return "\n".join([tables.markdown(table), "", LEGEND, "", "\n".join(f"- {line}" for line in lines)])
