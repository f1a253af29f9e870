"""Markdown tables: results of bench (in full, short for the README, docs/RESULTS.md), runs and their scores.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from adt_tree.method import METHODS, split_name
from models.checkpoint.files import read_json, reading, write_atomic

STORED = "bench.json"
Row = dict[str, Any]
# Key of a row -> the heading of its column, and the function that formats its values.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "method": ("method", str),
    "temperature": ("T", "{:g}".format),
    "total_token": ("nodes", lambda value: "-" if value is None else str(value)),
    "batch_size": ("batch", str),
    "SR": ("SR (95 %)", str),
    "tau": ("tau", str),
    "mean_depth": ("depth", "{:.2f}".format),
    "mean_nodes": ("drafted", "{:.1f}".format),
    "target_calls": ("target calls", "{:.1f}".format),
    "drafter_calls": ("drafter calls", "{:.1f}".format),
    "step_ms": ("ms per step", "{:.2f}".format),
    "median_s": ("seconds", "{:.2f}".format),
    "images_per_min": ("images/min", "{:.1f}".format),
    "same_image": ("= AR", "{:.0%}".format),
}
TIMED = ("SR", "step_ms", "median_s", "images_per_min")  # columns that --untimed leaves out
ONLY_IF_VARIED = ("total_token", "batch_size")  # columns that appear where a method ran with several values
LEGEND = (
    "SR: seconds of the AR baseline divided by the method's seconds, median over batches of prompts with "
    "its bootstrap 95 % interval, which needs several batches; tau: codes per target call, with its "
    "interval over images; depth, drafted: levels and nodes of a tree, on average; calls and seconds: per "
    "image; = AR: share of images equal to the AR baseline's, code for code."
)
# The ADT-Tree paper (2512.21857), on Anole-7b: table -> (method, temperature) -> speed-up, tau, mean depth.
# None: not known to us. These stand beside our figures and never in place of them.
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
    """Reads a result of bench, without the rows of methods that no longer exist; "dropped" names these.

    Raises UserError if the file is not a result of bench.
    """
    result = read_json(path, f"give a {STORED} that bench stored, or a folder that holds one")
    with reading(path, "run bench again"):
        if not result["rows"]:
            raise ValueError("holds no rows")
        drop_unknown_methods(result)
        text_of(result)  # fails if a value that a table needs is missing
    if not result["rows"]:
        raise UserError(f"{path}: none of its methods exists any more ({', '.join(result['dropped'])})")
    return result


def drop_unknown_methods(result: dict[str, Any]) -> None:
    """Deletes the rows and profiles of methods that no longer exist, and stores their names as `dropped`."""

    def exists(label: str) -> bool:
        return split_name(label.partition(":")[0])[0] in (*METHODS, "transformers")

    names = dict.fromkeys(row["method"] for row in result["rows"])
    result["dropped"] = [name for name in names if not exists(name)]
    result["rows"] = [row for row in result["rows"] if exists(row["method"])]
    if "profile" in result:
        result["profile"] = [part for part in result["profile"] if exists(part["configuration"].split()[0])]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of text, headings first, as a table: first column aligned left, the others right."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def cells(result: dict[str, Any], paper: str | None = None) -> list[list[str]]:
    """Returns the full table of a result as rows of text, headings first.

    Options that bench varied (row["varied"]) have a column each before SR. paper: name of the paper's table
    whose figures are the last columns.
    """
    rows = result["rows"]
    varied = list(dict.fromkeys(key for row in rows for key in row["varied"]))
    columns = [key for key in COLUMNS if key not in ONLY_IF_VARIED or varies(key, rows)]
    first = columns.index("SR")
    if untimed(result):
        columns = [key for key in columns if key not in TIMED]
    before, after = columns[:first], columns[first:]
    table = [[*(COLUMNS[key][0] for key in before), *varied, *(COLUMNS[key][0] for key in after)]]
    for row in rows:
        values = {**row, "SR": with_interval(row, "SR"), "tau": with_interval(row, "tau")}
        texts = {key: COLUMNS[key][1](values[key]) for key in columns}
        options = [str(row["varied"].get(key, "-")) for key in varied]
        table.append([*(texts[key] for key in before), *options, *(texts[key] for key in after)])
    if paper is not None and concerns(paper, rows):
        table[0] += ["paper SR", "paper tau", "paper depth"]
        for line, row in zip(table[1:], rows, strict=True):
            known = PAPER[paper].get((row["method"], row["temperature"]), (None, None, None))
            line += ["-" if value is None else f"{value:.2f}" for value in known]
    return table


def with_interval(row: Row, key: str) -> str:
    """Returns SR or tau with its interval. Results of earlier versions have no interval for tau. One of width
    0, from a single batch of prompts or of the baseline itself, is left out."""
    low, high = row.get(f"{key}_95") or (None, None)
    return f"{row[key]:.2f}" + ("" if low == high else f" ({low:.2f}-{high:.2f})")


def untimed(result: Mapping[str, Any]) -> bool:
    """Returns whether times mean nothing, because the machine did other work (bench --untimed)."""
    return bool(result.get("options", {}).get("untimed"))


def varies(key: str, rows: Sequence[Row]) -> bool:
    """Returns whether a method ran with several values of `key`."""
    return len({(row["method"], row[key]) for row in rows}) > len({row["method"] for row in rows})


def concerns(paper: str, rows: Sequence[Row]) -> bool:
    """Returns whether that table of the paper has a figure for any of these rows."""
    return any((row["method"], row["temperature"]) in PAPER[paper] for row in rows)


def origin(environment: Mapping[str, Any]) -> str:
    """Returns the machine, the code and the date of a figure in words."""
    dirty = ", with uncommitted changes" if environment["dirty"] else ""
    return (
        f"{environment['threads']} threads, {environment['device']}, torch {environment['torch']}, commit "
        f"{environment['commit']}{dirty}, {environment['date']}"
    )


def notes(result: dict[str, Any], paper: str | None = None) -> list[str]:
    """Returns the paragraphs below a table: how to repeat it, what was left out, the paper's set-up."""
    environment, runs = result["environment"], len(result.get("runs", ()))
    assembled = f", assembled from {runs} runs" if runs > 1 else ""
    seeds = result.get("options", {}).get("seeds", 1)
    prompts = f"{result['prompts'] // seeds} prompts" + (f" with {seeds} seeds each" if seeds > 1 else "")
    paragraphs = [
        f"`{result['command']}`, {prompts}, {environment['precision']}, {origin(environment)}{assembled}."
    ]
    if untimed(result):
        paragraphs.append("Times are left out, because the machine did other work meanwhile.")
    if result.get("dropped"):
        paragraphs.append(f"Rows left out, of methods that no longer exist: {', '.join(result['dropped'])}.")
    if paper is not None and concerns(paper, result["rows"]):
        paragraphs.append(
            f"Paper: Anole-7b on {PAPER_PROMPTS[paper]}, its own engine and GPU; -: not known to us."
        )
    return paragraphs


def text_of(result: dict[str, Any], paper: str | None = None) -> str:
    """Returns a result as Markdown: its table, its notes, and where the time went if bench profiled it."""
    parts = [markdown(cells(result, paper)), "", "\n\n".join(notes(result, paper))]
    profile = result.get("profile", ())
    if profile:
        kinds = list(profile[0]["shares"])
        shares = [
            [part["configuration"], *(f"{part['shares'][kind]:.0%}" for kind in kinds)] for part in profile
        ]
        parts += ["", markdown([["share of time", *kinds], *shares])]
    if result.get("leads"):
        parts += ["", markdown(lead_cells(result["leads"]))]
    if result.get("auto") and not untimed(result):
        parts += ["", markdown(auto_cells(result["auto"]))]
    return "\n".join(parts)


def lead_cells(leads: Sequence[Row]) -> list[list[str]]:
    """Returns a table of self-drafting beside the best rival of the same tree size, headings first."""
    table = [["self-draft against the best rival", "T", "nodes", "batch", "tau", "rival's tau", "lead, 95 %"]]
    for lead in leads:
        (ours, theirs), (low, high) = lead["tau"], lead["lead_95"]
        nodes = COLUMNS["total_token"][1](lead["total_token"])
        place = [f"{lead['temperature']:g}", nodes, str(lead["batch_size"])]
        pair = f"{lead['method']}, {lead['rival']}"
        table.append([pair, *place, f"{ours:.2f}", f"{theirs:.2f}", f"{low:+.2f} to {high:+.2f}"])
    return table


def auto_cells(comparisons: Sequence[Row]) -> list[list[str]]:
    """Returns a table of trees sized by cost beside the best other sizes, headings first."""
    chosen = "fastest other nodes, or ar, on even batches of prompts; on odd ones"
    table = [["with nodes auto", "T", "batch", chosen, "speed over it on odd ones; on even ones"]]
    for item in comparisons:
        best = "; ".join(str(size) for size in item["best"])
        ratios = "; ".join(f"{ratio:.2f}" for ratio in item["speed_over_best"])
        table.append([item["method"], f"{item['temperature']:g}", str(item["batch_size"]), best, ratios])
    return table


def short(result: dict[str, Any]) -> str:
    """Returns the README's table: one line per method, tau and speed-up at each temperature."""
    rows = result["rows"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    by_label: dict[str, dict[float, Row]] = {}
    for row in rows:
        by_label.setdefault(label(row, rows), {})[row["temperature"]] = row
    table = [["method", *(f"{name}, T = {t:g}" for t in temperatures for name in ("tau", "speed-up"))]]
    for name, at in by_label.items():
        values = [f"{at[t][key]:.2f}" if t in at else "-" for t in temperatures for key in ("tau", "SR")]
        table.append([name, *values])
    return markdown(table)


def acceptance_cells(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """Returns a table of runs as rows of text, headings first. runs: name, result of acceptance.average."""
    table = [["run", "images", "codes per call", "correlation with top-1 probability"]]
    for name, average in runs:
        correlation = "-" if average["correlation"] is None else f"{average['correlation']:.2f}"
        table.append([name, str(average["images"]), f"{average['codes_per_call']:.2f}", correlation])
    return table


def score_cells(runs: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Returns a table of scores as rows of text, headings first. runs: name -> scores by their name."""
    names = list(dict.fromkeys(name for scores in runs.values() for name in scores))
    table = [["run", *names]]
    for run, scores in runs.items():
        table.append([run, *(f"{scores[name]:.5g}" if name in scores else "-" for name in names)])
    return table


def label(row: Row, rows: Sequence[Row], without: Sequence[str] = ()) -> str:
    """Returns a row's method and the options that tell it from the other rows, except the temperature and the
    columns `without`."""
    named = [key for key in ONLY_IF_VARIED if key not in without]
    keys = [key for key in named if row[key] is not None and varies(key, rows)]
    words = [f"{COLUMNS[key][0]} {row[key]}" for key in keys]
    return " ".join([row["method"], *words, *(f"{key} {value}" for key, value in row["varied"].items())])


def section(name: str, result: dict[str, Any]) -> str:
    """Returns the section of a result in docs/RESULTS.md. A result of several batch sizes has a figure beside
    the document, throughput_file(name)."""
    picture = f"![Images per minute over images in flight]({throughput_file(name)})\n\n"
    return f"{picture if batched(result) else ''}{text_of(result)}"


def document(texts: Mapping[str, str]) -> str:
    """Returns docs/RESULTS.md. texts: the name of each result -> its section."""
    return "\n".join([OPENING, LEGEND, "", *(f"## {name}\n\n{text}\n" for name, text in texts.items())])


def batched(result: Mapping[str, Any]) -> bool:
    """Returns whether a result compares several batch sizes."""
    return len({row["batch_size"] for row in result["rows"]}) > 1


def throughput_file(name: str) -> str:
    """Returns the file name of a result's figure of images per minute."""
    return f"{name}_throughput.png"


def insert(file: Path, name: str, text: str) -> None:
    """Replaces the text between a document's markers. Raises UserError if it has none of that name."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    try:
        before = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--into {file}: cannot be read ({getattr(error, 'strerror', error)})") from None
    head, start, rest = before.partition(first)
    _, end, tail = rest.partition(last)
    if not (start and end):
        raise UserError(f"--into {file}: has no lines {first} and {last}")
    write_atomic(file, f"{head}{first}\n{text}\n{last}{tail}".encode())
