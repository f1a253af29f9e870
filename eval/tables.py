"""Markdown tables of stored results of bench: in full, and as README and docs/RESULTS.md show them.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from adt_tree.method import METHODS, split_name
from eval.columns import COLUMNS, SETTINGS, Row
from models.checkpoint.files import read_json, read_text, reading, write_atomic

STORED = "bench.json"
# The ADT-Tree paper (2512.21857), on Anole-7b: table -> (method, temperature) -> speed-up, tau.
# None: not known to us. These stand beside our figures and never in place of them.
PAPER: dict[str, dict[tuple[str, float], tuple[float, float | None]]] = {
    "coco": {
        ("eagle-2", 0.0): (1.62, None),
        ("eagle-2-lantern", 0.0): (3.03, None),
        ("adt-tree", 0.0): (2.21, 3.40),
        ("adt-tree-lantern", 0.0): (3.13, 4.86),
    },
    "parti": {("adt-tree-lantern", 0.0): (3.05, 3.97)},
}
PAPER_PROMPTS = {"coco": "100 captions of MS-COCO 2017", "parti": "PartiPrompts"}
SHORT = ("ar", "adt-tree", "self-draft", "self-draft-lantern", "sjd", "zipar")  # rows of README's table
RULES = {  # value of --verify -> the title of its table beside the paper's figures
    "rejection": "Verified by the published rejection rule, as in the paper",
    "coupled": "Verified by the coupled rule of this repository; without LANTERN it gives the images of ar",
}


def read(path: Path) -> dict[str, Any]:
    """Reads a result of bench, of this version or an earlier one. Raises UserError if it is none."""
    result = read_json(path, f"give a {STORED} that bench stored, or a folder that holds one")
    with reading(path, "give a result of bench, or run bench again"):
        if not isinstance(result, dict) or not result.get("rows"):
            raise ValueError("holds no rows of bench")
        text_of(result)  # fails if a value that a table needs is missing
    return result


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of text, headings first, as a table: first column aligned left, the others right."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def table(lines: Iterable[Mapping[str, str]]) -> str:
    """Returns lines, each a text by heading, as a Markdown table. A line without a heading has "-" there."""
    lines = list(lines)
    headings = list(dict.fromkeys(heading for line in lines for heading in line))
    return markdown([headings, *([line.get(heading, "-") for heading in headings] for line in lines)])


def lines_of(
    rows: Sequence[Row],
    index: Sequence[str],
    values: Sequence[str],
    across: str | None = None,
) -> list[dict[str, str]]:
    """Returns rows of bench as lines for `table`.

    index: the keys, of columns or of varied options, whose values begin a line. values: the keys of the
    columns that follow, of which a row may lack some. across: a key whose values stand side by side in one
    line, each with all of `values`.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        names = {heading(key): text(row, key) for key in index}
        line = lines.setdefault(tuple(names.values()), names)
        for key in (key for key in values if key in row):
            name = heading(key)
            if across is not None:
                place = text(row, across)
                name = place if len(values) == 1 else f"{name}, {heading(across)} = {place}"
            line[name] = text(row, key)
    return list(lines.values())


def heading(key: str) -> str:
    """Returns the heading of a column or of a varied option."""
    return COLUMNS[key].heading if key in COLUMNS else key


def text(row: Row, key: str, intervals: bool = True) -> str:
    """Returns the cell of a row in a column, or its value of a varied option."""
    return COLUMNS[key].text(row, intervals) if key in COLUMNS else str(row["varied"].get(key, "-"))


def settings_of(rows: Sequence[Row], always: Sequence[str] = ("method",)) -> list[str]:
    """Returns the keys that tell rows apart: the columns `always`, other settings of which one method has
    several, and the options that --vary names."""
    methods = {row["method"] for row in rows}
    settings = [
        key
        for key in SETTINGS
        if key in always or len({(row["method"], row[key]) for row in rows}) > len(methods)
    ]
    return [*settings, *dict.fromkeys(key for row in rows for key in row["varied"])]


def text_of(result: Mapping[str, Any], paper: str | None = None) -> str:
    """Returns a result as Markdown: its full table, how to repeat it, and the shares of --profile.

    paper: name of the paper's table; instead of the full one, it gives a table for each rule of verification,
    with the paper's figures as the last columns.
    """
    rows = result["rows"]
    if paper is None:
        timed = not untimed(result)
        values = [
            key for key, column in COLUMNS.items()
            if column.heading and key not in SETTINGS and (timed or not column.timed)
        ]  # fmt: skip
        parts = [table(lines_of(rows, settings_of(rows, ("method", "temperature")), values))]
    else:
        parts = paper_tables(rows, paper)
    parts.append(note(result))
    if result.get("profile"):
        shares = [(part["configuration"], part["shares"]) for part in result["profile"]]
        parts.append(
            table(
                {"share of time": name, **{k: f"{x:.0%}" for k, x in parts.items()}} for name, parts in shares
            )
        )
    return "\n\n".join(parts)


def paper_tables(rows: Sequence[Row], paper: str) -> list[str]:
    """Returns a titled table for each rule that the rows were verified by, as wide as the paper's: speed-up
    and mean accepted length (tau) at each temperature, then the paper's own figures where we know them."""
    parts = []
    for rule, title in RULES.items():
        verified = [row for row in rows if row["varied"].get("verify", "coupled") == rule]
        if not verified:
            continue
        lines = lines_of(verified, ("method",), ("SR", "tau"), "temperature")
        for line, method in zip(lines, dict.fromkeys(row["method"] for row in verified), strict=True):
            for temperature in dict.fromkeys(row["temperature"] for row in verified):
                known = PAPER[paper].get((method, temperature), (None, None))
                for name, value in zip(("speed-up", "tau"), known, strict=True):
                    cell = "-" if value is None else f"{value:.2f}"
                    line[f"paper's {name}, T = {temperature:g}"] = cell
        parts += [f"**{title}**", table(lines)]
    source = f"Paper: Anole-7b on {PAPER_PROMPTS[paper]}, its own engine and GPU; -: not known to us."
    return [*parts, source]


def short(result: Mapping[str, Any]) -> str:
    """Returns the README's table: some methods at the highest temperature measured, in words that need no
    legend."""
    highest = max(row["temperature"] for row in result["rows"])
    rows = {row["method"]: row for row in result["rows"] if row["temperature"] == highest}
    return table(
        {
            "method": name,
            "image": image_of(name, rows[name]["exact"]),
            "codes per pass": text(rows[name], "tau", intervals=False),
            "speed": text(rows[name], "SR", intervals=False),
        }
        for name in SHORT if name in rows
    )  # fmt: skip


def image_of(name: str, exact: bool) -> str:
    """Returns in words what a method keeps of the model's images. name: with LANTERN's suffix or without."""
    plain, lantern = split_name(name)
    if lantern or METHODS[plain].usual_relaxed is not None:
        return "changed"
    return "that of plain decoding" if exact else "another sample"


def note(result: Mapping[str, Any]) -> str:
    """Returns how to repeat a result: command, prompts, precision, device and commit."""
    environment, options = result["environment"], result["options"]
    seeds = options.get("images_per_prompt") or options.get("seeds", 1)  # its alias in stored results
    prompts = f"{result['prompts'] // seeds} prompts" + (f" with {seeds} seeds each" if seeds > 1 else "")
    busy = " Times are left out, because the machine did other work meanwhile." if untimed(result) else ""
    where = f"{environment['precision']}, {origin(environment)}"
    return f"`{result['command']}`, {prompts}, {where}.{busy}"


def origin(environment: Mapping[str, Any]) -> str:
    """Returns the machine, the code and the date of a measurement in words."""
    unknown = ", perhaps with uncommitted changes"  # git failed
    dirty = {True: ", with uncommitted changes", False: "", None: unknown}[environment["dirty"]]
    return (
        f"{environment['threads']} threads, {environment['device']}, torch {environment['torch']}, commit "
        f"{environment['commit'] or 'unknown'}{dirty}, {environment['date']}"
    )


def untimed(result: Mapping[str, Any]) -> bool:
    """Returns whether times mean nothing, because the machine did other work (bench --untimed)."""
    return bool(result["options"].get("untimed"))


def label(row: Row, rows: Sequence[Row]) -> str:
    """Returns a row's method and the options, except the temperature, that tell it from the other rows."""
    keys = [key for key in settings_of(rows) if key not in ("method", "temperature")]
    words = [f"{heading(key)} {text(row, key)}" for key in keys if text(row, key) != "-"]
    return " ".join([row["method"], *words])


def curve(row: Row, rows: Sequence[Row]) -> str:
    """Returns a row's method, and its nodes if the method has several numbers of them."""
    several = len({other["total_token"] for other in rows if other["method"] == row["method"]}) > 1
    return f"{row['method']} {row['total_token']}" if several else row["method"]


def insert(file: Path, name: str, text: str) -> None:
    """Replaces the text between a document's markers. Raises UserError if it has none of that name."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    with reading(file, "give another document"):
        before = read_text(file)
    head, start, rest = before.partition(first)
    _, end, tail = rest.partition(last)
    if not (start and end):
        raise UserError(f"{file}: has no lines {first} and {last}; add them")
    write_atomic(file, f"{head}{first}\n{text}\n{last}{tail}".encode())
