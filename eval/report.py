"""report: stored results -> tables in Markdown, into a document between its markers, or a page. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import markdown
from eval import paper as beside
from eval.errors import UserError
from eval.paper import PAPER

COLUMNS = {
    "arm": "arm",
    "temperature": "T",
    "SR": "SR (95 %)",
    "tau": "tau",
    "mean_depth": "depth",
    "mean_nodes": "nodes",
    "target_calls": "target calls",
    "drafter_calls": "drafter calls",
    "median_s": "seconds",
    "same_image": "= AR",
}

STORED = ("bench.json", "sweep.json", "budget.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of report."""
    group = parser.add_argument_group("report")
    group.add_argument(
        "results",
        nargs="+",
        metavar="RESULT",
        help="JSON files that bench, sweep or budget stored, or their folders; with --html "
        "also folders of generate_images and acceptance, and what scored them",
    )
    group.add_argument(
        "--into",
        metavar="FILE",
        help="document to update between <!-- NAME:start --> and <!-- NAME:end -->, NAME being the result's "
        "file name without suffix (default: print)",
    )
    group.add_argument(
        "--html",
        metavar="FILE",
        help="write one self-contained page, its plots as PNG beside it: tables, the images of the runs "
        "side by side, heatmaps (default: tables on stdout)",
    )
    group.add_argument(
        "--paper",
        choices=tuple(PAPER),
        help="set the ADT-Tree paper's figures for Anole-7b beside ours: of its table of MS-COCO, or of "
        "PartiPrompts (default: none)",
    )
    group.add_argument("--top", type=int, metavar="ROWS", help="rows kept, as stored (default: all)")


def run(args: argparse.Namespace) -> None:
    """Print the tables, or put each between its markers."""
    if args.html is not None:
        if args.into is not None:
            raise UserError("--into and --html: give one of them; a page has no markers")
        from eval.compare import write_page

        write_page(args)
        return
    for path in [found for name in args.results for found in tables_in(Path(name))]:
        text = text_of(path, args)
        if args.into is None:
            print(text)
        else:
            markdown.insert(Path(args.into), path.stem, text)


def text_of(path: Path, args: argparse.Namespace) -> str:
    """A stored result as Markdown."""
    stored = read_stored(path)
    if _is_flow(stored):
        return flow(stored)
    result, paper = checked(path, stored), args.paper
    told = [beside.note(paper)] if paper and beside.concerns(paper, result["results"]) else []
    lines = [markdown.table(grid(result, args.top, paper)), "", source(result), *told]
    lines += _split(result.get("profile", []), "share of time", "{:.0%}")
    lines += _split(result.get("cycles", []), "ms a cycle, by the cost table", "{:.2f}")
    return "\n".join(lines)


def tables_in(path: Path) -> list[Path]:
    """A result's file, or those in a folder. UserError if it holds none."""
    if not path.is_dir():
        return [path]
    found = [path / name for name in STORED if (path / name).is_file()]
    if not found:
        names = ", ".join(STORED)
        raise UserError(f"{path}: it holds none of {names}; with --html, images are shown as well")
    return found


def read_result(path: Path) -> dict[str, Any]:
    """A result that bench, sweep or budget stored. UserError if it is not one."""
    return checked(path, read_stored(path))


def read_stored(path: Path) -> dict[str, Any]:
    """A stored result, whatever its rows. UserError if it has none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a JSON file that bench or sweep stored") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path}: not JSON; give a file that bench or sweep stored") from None
    if not isinstance(result, dict) or not result.get("results"):
        raise UserError(f"{path}: it holds no results; give a file that bench or sweep stored")
    return result


def checked(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """A result whose rows are arms of bench. UserError if they are not."""
    missing = [key for key in (*COLUMNS, "SR_95") if any(key not in row for row in result["results"])]
    if missing:
        raise UserError(
            f"{path}: its rows have no {', '.join(missing)}; give a file that bench, sweep or budget stored"
        )
    return result


def _is_flow(result: dict[str, Any]) -> bool:
    """Whether throughput stored it."""
    rows = result["results"]
    return isinstance(rows, list) and all(isinstance(row, dict) and "images_per_min" in row for row in rows)


def flow(result: dict[str, Any]) -> str:
    """What throughput stored: images a minute and nodes by images in flight, above its source."""
    rows = result["results"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    table = [["images in flight", *arms, "slots full", "= AR"]]
    for count in dict.fromkeys(row["batch_size"] for row in rows):
        own = [row for row in rows if row["batch_size"] == count]
        cells = [f"{row['images_per_min']:.1f} (n {row['nodes']})" for row in own]
        full, same = (min(row[key] for row in own) for key in ("occupancy", "same_image"))
        table.append([str(count), *cells, f"{full:.0%}", f"{same:.0%}"])
    told = f"Images a minute (drafted nodes a tree). {source(result)}"
    return "\n".join([markdown.table(table), "", told])


def grid(result: dict[str, Any], top: int | None, paper: str | None) -> list[list[str]]:
    """The cells of a result's table, headings first; paper: the table of the paper's that stands beside."""
    rows = [list(COLUMNS.values())] + [_cells(row) for row in result["results"][:top]]
    if paper is not None and beside.concerns(paper, result["results"]):
        rows[0] += beside.HEADINGS
        for cells, row in zip(rows[1:], result["results"], strict=False):  # --top may leave rows out
            cells += beside.cells(paper, row["arm"], row["temperature"])
    return rows


def source(result: dict[str, Any]) -> str:
    """What a reader needs to repeat a result."""
    runs = len(result.get("runs", []))
    dirty = ", with uncommitted changes" if result["dirty"] else ""
    return (
        f"`{result['command']}`, {result['prompts']} prompts, guidance {result['cfg']:g}, "
        f"{result['precision']}, {result['threads']} threads, {result['device']}, torch {result['torch']}, "
        f"commit {result['commit']}{dirty}, {result['date']}"
        f"{f', assembled from {runs} runs' if runs > 1 else ''}."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["SR_95"]
    shown = dict(row, SR=f"{row['SR']:.2f} ({low:.2f}-{high:.2f})", same_image=f"{row['same_image']:.0%}")
    shown |= {key: f"{row[key]:.2f}" for key in ("tau", "mean_depth")}
    shown |= {key: f"{row[key]:.1f}" for key in ("mean_nodes", "target_calls", "drafter_calls")}
    shown |= {"median_s": f"{row['median_s']:.2f}", "temperature": f"{row['temperature']:g}"}
    return [str(shown[key]) for key in COLUMNS]


def _split(rows: Sequence[dict[str, Any]], title: str, style: str) -> list[str]:
    """Where the time of each arm goes, if the run profiled it."""
    if not rows:
        return []
    parts = [key for key in rows[0] if key not in ("arm", "temperature")]
    cells = [[title, "T", *parts]]
    cells += [
        [row["arm"], f"{row['temperature']:g}", *(style.format(row[part]) for part in parts)] for row in rows
    ]
    return ["", markdown.table(cells)]
