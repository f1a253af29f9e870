"""Stored results of bench -> Markdown: the full table, the README's short one, docs/RESULTS.md. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from adt_tree.method import LANTERN_SUFFIX, METHODS
from models.checkpoint.files import write_atomic

STORED = "bench.json"
Row = dict[str, Any]
# column of a row -> its heading and how a value is written; those of FOLDED stand where they vary
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "method": ("method", str),
    "temperature": ("T", "{:g}".format),
    "total_token": ("nodes", lambda value: "-" if value is None else str(value)),
    "batch_size": ("batch", str),
    "SR": ("SR (95 %)", str),
    "tau": ("tau", "{:.2f}".format),
    "mean_depth": ("depth", "{:.2f}".format),
    "mean_nodes": ("drafted", "{:.1f}".format),
    "target_calls": ("target calls", "{:.1f}".format),
    "drafter_calls": ("drafter calls", "{:.1f}".format),
    "step_ms": ("ms per step", "{:.2f}".format),
    "median_s": ("seconds", "{:.2f}".format),
    "images_per_min": ("images/min", "{:.1f}".format),
    "same_image": ("= AR", "{:.0%}".format),
}
FOLDED = ("total_token", "batch_size")
LEGEND = (
    "SR: seconds of the AR baseline / its own, median over prompts with its bootstrap 95 % interval; tau: "
    "codes per target call; depth, drafted: of a tree, on average; calls and seconds: per image; = AR: "
    "images equal to the AR baseline's, code for code."
)
# The ADT-Tree paper (2512.21857), on Anole-7b: table -> (method, T) -> speed-up, tau, mean depth. Only what
# is known to us: None else. To stand beside our figures, never for them.
PAPER: dict[str, dict[tuple[str, float], tuple[float, float | None, float]]] = {
    "coco": {
        ("eagle-2", 0.0): (1.62, None, 5.0),
        ("eagle-2-lantern", 0.0): (3.03, None, 5.0),
        ("adt-tree", 0.0): (2.21, 3.40, 3.86),
        ("adt-tree-lantern", 0.0): (3.13, 4.86, 5.15),
    },
    "parti": {("adt-tree-lantern", 0.0): (3.05, 3.97, 4.31)},
}
PAPER_PROMPTS = {"coco": "100 captions of MS-COCO 2017", "parti": "PartiPrompts"}
OPENING = """# Results

Written by `python main.py report --write docs/RESULTS.md` from docs/results/*.json; edit neither by hand.
"""


def read(path: Path) -> dict[str, Any]:
    """A result that bench stored, without rows of methods that no longer exist; `dropped` names those.

    UserError, one line, if the file is not such a result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a {STORED}, or a folder that holds one") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise UserError(f"{path}: not JSON, or nested too deeply; give a file that bench stored") from None
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: it holds no rows; give a file that bench stored")
    try:
        without_dropped_methods(result)
        text_of(result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); run bench again") from None
    return result


def without_dropped_methods(result: dict[str, Any]) -> None:
    """Move the names of methods that no longer exist to `dropped`, and delete their rows and profiles."""

    def exists(label: str) -> bool:
        name = label.partition(":")[0].removesuffix(LANTERN_SUFFIX)
        return name in (*METHODS, "transformers")

    names = dict.fromkeys(row["method"] for row in result["rows"])
    result["dropped"] = [name for name in names if not exists(name)]
    result["rows"] = [row for row in result["rows"] if exists(row["method"])]
    if "profile" in result:
        result["profile"] = [part for part in result["profile"] if exists(part["configuration"].split()[0])]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Cells, headings first, as a table; the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def cells(result: dict[str, Any], paper: str | None = None) -> list[list[str]]:
    """The cells of a result's table, headings first. paper: the table of the paper that stands beside it."""
    rows = result["rows"]
    varied = list(dict.fromkeys(key for row in rows for key in row["varied"]))
    columns = [key for key in COLUMNS if key not in FOLDED or varies(key, rows)]
    place = columns.index("SR")
    table = [[COLUMNS[key][0] for key in columns]]
    for row in rows:
        low, high = row["SR_95"]
        shown = {**row, "SR": f"{row['SR']:.2f} ({low:.2f}-{high:.2f})"}
        table.append([COLUMNS[key][1](shown[key]) for key in columns])
    for line, values in zip(table, [dict(zip(varied, varied, strict=True)), *(row["varied"] for row in rows)],
                            strict=True):  # fmt: skip
        line[place:place] = [str(values.get(key, "-")) for key in varied]
    if paper is not None and concerns(paper, rows):
        table[0] += ["paper SR", "paper tau", "paper depth"]
        for line, row in zip(table[1:], rows, strict=True):
            known = PAPER[paper].get((row["method"], row["temperature"]), (None, None, None))
            line += ["-" if value is None else f"{value:.2f}" for value in known]
    return table


def varies(key: str, rows: Sequence[Row]) -> bool:
    """Whether a column takes several values in some method."""
    return len({(row["method"], row[key]) for row in rows}) > len({row["method"] for row in rows})


def concerns(paper: str, rows: Sequence[Row]) -> bool:
    """Whether the paper has a figure for any row of ours."""
    return any((row["method"], row["temperature"]) in PAPER[paper] for row in rows)


def notes(result: dict[str, Any], paper: str | None = None) -> list[str]:
    """What stands below a result's table: what a reader needs to repeat it, and whose other figures are."""
    place, runs = result["environment"], len(result.get("runs", ()))
    dirty = ", with uncommitted changes" if place["dirty"] else ""
    assembled = f", assembled from {runs} runs" if runs > 1 else ""
    found = [
        f"`{result['command']}`, {result['prompts']} prompts, {place['precision']}, {place['threads']} "
        f"threads, {place['device']}, torch {place['torch']}, commit {place['commit']}{dirty}, "
        f"{place['date']}{assembled}."
    ]
    if result.get("dropped"):
        found.append(f"Rows left out, of methods that no longer exist: {', '.join(result['dropped'])}.")
    if paper is not None and concerns(paper, result["rows"]):
        found.append(
            f"Paper: Anole-7b on {PAPER_PROMPTS[paper]}, its own engine and GPU; -: not known to us."
        )
    return found


def text_of(result: dict[str, Any], paper: str | None = None) -> str:
    """A result as Markdown: its table, where it comes from, and where the time went if it was profiled."""
    parts = [markdown(cells(result, paper)), "", "\n\n".join(notes(result, paper))]
    profile = result.get("profile", ())
    if profile:
        keys = list(profile[0]["shares"])
        split = [[own["configuration"], *(f"{own['shares'][key]:.0%}" for key in keys)] for own in profile]
        parts += ["", markdown([["share of time", *keys], *split])]
    return "\n".join(parts)


def short(result: dict[str, Any]) -> str:
    """tau and speed-up of every method by temperature, a line each: the README's table."""
    rows = result["rows"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    found: dict[str, dict[float, Row]] = {}
    for row in rows:
        found.setdefault(label(row, rows), {})[row["temperature"]] = row
    table = [["method", *(f"{name}, T = {t:g}" for t in temperatures for name in ("tau", "speed-up"))]]
    for name, own in found.items():
        values = [f"{own[t][key]:.2f}" if t in own else "-" for t in temperatures for key in ("tau", "SR")]
        table.append([name, *values])
    return markdown(table)


def acceptance_cells(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """The cells of runs' averages (eval.acceptance), headings first."""
    table = [["run", "images", "codes per call", "correlation with top-1 probability"]]
    for name, own in runs:
        link = "-" if own["correlation"] is None else f"{own['correlation']:.2f}"
        table.append([name, str(own["images"]), f"{own['codes_per_call']:.2f}", link])
    return table


def label(row: Row, rows: Sequence[Row]) -> str:
    """A row's method and what else differs in the result, its temperature left out."""
    told = [key for key in FOLDED if row[key] is not None and varies(key, rows)]
    words = [f"{COLUMNS[key][0]} {row[key]}" for key in told]
    return " ".join([row["method"], *words, *(f"{key} {value}" for key, value in row["varied"].items())])


def document(paths: Sequence[Path]) -> str:
    """All results, one section each under its file's name: docs/RESULTS.md."""
    sections = [f"## {path.stem}\n\n{text_of(read(path))}\n" for path in paths]
    return "\n".join([OPENING, LEGEND, "", *sections])


def insert(file: Path, name: str, text: str) -> None:
    """Replace what stands between a document's markers. UserError if it has none of that name."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    try:
        before = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--into {file}: cannot be read ({getattr(error, 'strerror', error)})") from None
    head, found, rest = before.partition(first)
    _, closed, tail = rest.partition(last)
    if not (found and closed):
        raise UserError(f"--into {file}: it has no lines {first} and {last}")
    write_atomic(file, f"{head}{first}\n{text}\n{last}{tail}".encode())
