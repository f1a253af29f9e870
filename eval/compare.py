"""The page of a report: tables and plots, images of several runs side by side, heatmaps, scores. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import figures, page, paper
from eval.errors import UserError
from eval.metrics.scores import SCORES
from eval.metrics.scores import read as read_scores
from eval.outputs import file_name, make_folder, read_statistics, tau_of, write_atomic
from eval.report import STORED, grid, read_result, source

ACCEPTANCE = "acceptance"
MOST_ROWS, MOST_MAPS = 16, 4  # prompts shown, heatmaps a run


@dataclass(frozen=True, slots=True)
class Run:
    """Images of generate_images, with their statistics."""

    folder: Path
    label: str
    images: dict[str, dict[str, Any]]

    def prompt(self, name: str) -> str | None:
        """What an image was drawn from; None if the run has none of that name."""
        return self.images[name]["prompt"] if name in self.images else None

    def picture(self, name: str) -> Path | None:
        """Where an image lies; None if the run has none of that name."""
        path = self.folder / "img" / f"{file_name(name)}.png"
        return path if name in self.images and path.is_file() else None


def write_page(args: argparse.Namespace) -> None:
    """Write --html from all results. UserError for a path that holds nothing to show."""
    target = Path(args.html)
    make_folder(target.parent)
    tables, runs, others = [], [], []
    for name in args.results:
        path, before = Path(name), len(tables) + len(runs) + len(others)
        if path.is_file() or not path.exists():
            tables.append(path)
            continue
        tables += [path / part for part in STORED if (path / part).is_file()]
        if any(path.glob("global_statistics_*.json")):
            runs.append(path)
        shown = (f"{ACCEPTANCE}.json", SCORES)
        others += [path / part for part in shown if (path / part).is_file()]
        if before == len(tables) + len(runs) + len(others):
            raise UserError(
                f"{path}: it holds no results; give a JSON file or a folder of bench, sweep, budget, "
                "generate_images or acceptance"
            )
    sections = [_speed(path, args, target) for path in tables]
    if runs:
        sections += _images([_run(path, runs) for path in runs])
    scored = [path for path in others if path.name == SCORES]
    if scored:
        sections.append(_scores(scored))
    for path in others:
        if path.name != SCORES:
            sections.append(_acceptance(path))
    write_atomic(target, page.document("ADT-Tree: results", sections).encode())
    print(f"{target}: {len(sections)} sections")


def _label(path: Path, beside: Sequence[Path]) -> str:
    """A folder's name, as long as it takes to tell it from the others."""
    alike = [other for other in beside if other.name == path.name]
    return path.name if len(alike) < 2 else str(path)


def _run(path: Path, beside: Sequence[Path]) -> Run:
    images = {name: entry for window in read_statistics(path) for name, entry in window.items()}
    if not images:
        raise UserError(f"{path}: its statistics name no image; run generate_images on it again")
    return Run(path, _label(path, beside), images)


def _speed(path: Path, args: argparse.Namespace, target: Path) -> str:
    """A result of bench, sweep or budget: its plot, its table, where it comes from."""
    result = read_result(path)
    plot = target.with_name(f"{target.stem}_{_slug(path)}.png")
    rows = result["results"][: args.top]
    figures.speed(rows, plot)
    told = bool(args.paper) and paper.concerns(args.paper, result["results"])
    notes = [page.note(source(result)), *([page.note(paper.note(args.paper))] if told else [])]
    cells = page.table(grid(result, args.top, args.paper))
    return page.section(f"Speed: {_slug(path)}", page.picture(plot, "tau and speed-up by arm"), cells, *notes)


def _slug(path: Path) -> str:
    """A result's name: its file's, behind its folder's where the file's says little."""
    return f"{path.parent.resolve().name}_{path.stem}" if path.name in STORED else path.stem


def _images(runs: Sequence[Run]) -> list[str]:
    """What the runs have in figures, side by side in pictures, and their heatmaps."""
    rows = [["run", "images", "tau", "depth", "nodes", "target calls", "drafter calls", "seconds"]]
    rows += [[run.label, *_means(run)] for run in runs]
    names = [name for name in runs[0].images if len({run.prompt(name) for run in runs}) == 1]
    shown = names[:MOST_ROWS]
    tiles = [
        (
            str(runs[0].prompt(name)),
            [(run.picture(name), _below(run, runs[0], name)) for run in runs],
        )
        for name in shown
    ]
    told = f"The first {len(shown)} of the {len(names)} prompts that all runs drew, paired by name and text."
    sections = [
        page.section("Runs", page.table(rows)),
        page.section("Images", page.note(told), page.gallery([run.label for run in runs], tiles)),
    ]
    for run in runs:
        maps = sorted(run.folder.glob("heatmap_*.png"))[:MOST_MAPS]
        if maps:
            sections.append(page.section(f"Heatmaps: {run.label}", *(page.picture(m, m.stem) for m in maps)))
    return sections


def _means(run: Run) -> list[str]:
    """Means over a run's images; tau over target calls."""
    entries = list(run.images.values())
    keys = {"mean_depth": 2, "mean_nodes": 1, "target_calls": 1, "drafter_calls": 1, "latency": 2}
    means = [
        f"{sum(entry[key] for entry in entries) / len(entries):.{digits}f}" for key, digits in keys.items()
    ]
    return [str(len(entries)), f"{tau_of(entries):.2f}", *means]


def _below(run: Run, first: Run, name: str) -> str:
    """tau of an image, and whether it is the first run's, pixel for pixel."""
    tau = f"tau {run.images[name]['acceptance_length']:.2f}"
    mine, other = run.picture(name), first.picture(name)
    if run is first or mine is None or other is None:
        return tau
    return f"{tau}, {'the same image' if mine.read_bytes() == other.read_bytes() else 'another image'}"


def _acceptance(path: Path) -> str:
    """The maps of a run by cell."""
    rows = [["run", "images", "codes a target call", "correlation with top-1 probability"]]
    for row in _stored(path)[ACCEPTANCE]:
        link = row["correlation"]
        rows.append(
            [
                row["run"],
                str(row["images"]),
                f"{row['codes_a_call']:.2f}",
                "-" if link is None else f"{link:.2f}",
            ]
        )
    picture = page.picture(path.with_suffix(".png"), "maps of acceptance, depth, width and certainty")
    return page.section("Acceptance over the image", picture, page.table(rows))


def _scores(paths: Sequence[Path]) -> str:
    """What the metrics say of the runs' images: a row a run, the newest value of each score."""
    folders, found, told = [path.parent for path in paths], list[dict[str, float]](), dict[str, None]()
    for path in paths:
        newest = {name: entry for entry in read_scores(path) for name in entry["scores"]}
        found.append({name: entry["scores"][name] for name, entry in newest.items()})
        told |= {
            f"`{entry['line']}`, commit {entry['commit']}, {entry['date']}": None for entry in newest.values()
        }
    names = list(dict.fromkeys(name for own in found for name in own))
    rows = [["run", *names]]
    for folder, own in zip(folders, found, strict=True):
        rows.append([_label(folder, folders), *(f"{own[name]:.5g}" if name in own else "" for name in names)])
    return page.section("Scores", page.table(rows), *map(page.note, told))


def _stored(path: Path) -> dict[str, Any]:
    """A stored JSON object. UserError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}): make it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: make it again")
    return content
