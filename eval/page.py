"""The page of a report: one HTML file, styles and pictures in it. Races alone run a script. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from eval import acceptance, figures, report
from eval.html import document, gallery, note, picture, section, table
from eval.metrics.scores import SCORES
from eval.metrics.scores import read as read_scores
from eval.race import embedded, races
from eval.runs.run_folder import file_name, read_statistics, tau_of
from models.checkpoint.files import make_folder, write_atomic

TITLE = "ADT-Tree: results"
MOST_ROWS, MOST_MAPS, MOST_RACES = 16, 4, 4  # prompts shown, heatmaps of a run, races
MEANS = {"mean_depth": 2, "mean_nodes": 1, "target_calls": 1, "drafter_calls": 1, "latency": 2}  # digits


@dataclass(frozen=True, slots=True)
class Run:
    """A folder of generate_images, with its statistics by image."""

    folder: Path
    label: str
    images: dict[str, dict[str, Any]]

    def prompt(self, name: str) -> str | None:
        """What an image was made from; None if the run has none of that name."""
        return self.images[name]["prompt"] if name in self.images else None

    def picture(self, name: str) -> Path | None:
        """Where an image lies; None if the run has none of that name."""
        path = self.folder / "img" / f"{file_name(name)}.png"
        return path if name in self.images and path.is_file() else None


def write(target: Path, tables: Sequence[Path], folders: Sequence[Path], paper: str | None) -> int:
    """Write the page, its plots as PNG beside it; returns the number of sections.

    tables: results of bench; folders: of generate_images.
    """
    make_folder(target.parent)
    sections = [speed(path, target, paper) for path in tables]
    sections += [section(f"Race: {race[0].prompt}", embedded(race)) for race in races(folders)[:MOST_RACES]]
    runs = [open_run(path, folders) for path in folders]
    if runs:
        sections += [means(runs), images(runs), *heatmaps(runs), maps(runs, target)]
    if any((run.folder / SCORES).is_file() for run in runs):
        sections.append(scores(runs))
    write_atomic(target, document(TITLE, "\n".join([f"<h1>{TITLE}</h1>", *sections])).encode())
    return len(sections)


def open_run(path: Path, beside: Sequence[Path]) -> Run:
    """A run, called by its folder's name if no other has it. UserError if it has no image."""
    found = read_statistics(path)
    if not found:
        raise UserError(f"{path}: its statistics name no image; run generate_images on it again")
    alone = sum(other.name == path.name for other in beside) < 2
    return Run(path, path.name if alone else str(path), found)


def speed(path: Path, target: Path, paper: str | None) -> str:
    """A result of bench: its plot, its table, where it comes from."""
    result = report.read(path)
    rows, name = result["rows"], path.parent.resolve().name if path.name == report.STORED else path.stem
    plot = target.with_name(f"{target.stem}_{name}.png")
    figures.speed(rows, [report.label(row, rows) for row in rows], plot)
    told = [note(text) for text in (*report.notes(result, paper), report.LEGEND)]
    cells = table(report.cells(result, paper))
    return section(f"Speed: {name}", picture(plot, "tau and speed-up by method"), cells, *told)


def means(runs: Sequence[Run]) -> str:
    """Means over each run's images; tau over its target calls."""
    rows = [["run", "images", "tau", "depth", "drafted", "target calls", "drafter calls", "seconds"]]
    for run in runs:
        entries = list(run.images.values())
        mean = [
            f"{sum(entry[key] for entry in entries) / len(entries):.{digits}f}"
            for key, digits in MEANS.items()
        ]
        rows.append([run.label, str(len(entries)), f"{tau_of(entries):.2f}", *mean])
    return section("Runs", table(rows))


def images(runs: Sequence[Run]) -> str:
    """The runs' images side by side, of prompts that all of them have."""
    first = runs[0]
    names = [name for name in first.images if len({run.prompt(name) for run in runs}) == 1]
    shown = names[:MOST_ROWS]
    tiles = [
        (str(first.prompt(name)), [(run.picture(name), _below(run, first, name)) for run in runs])
        for name in shown
    ]
    told = f"The first {len(shown)} of the {len(names)} prompts that all runs have, paired by name and text."
    return section("Images", note(told), gallery([run.label for run in runs], tiles))


def _below(run: Run, first: Run, name: str) -> str:
    """tau of an image, and whether it is the first run's, pixel for pixel."""
    tau = f"tau {run.images[name]['acceptance_length']:.2f}"
    mine, other = run.picture(name), first.picture(name)
    if run is first or mine is None or other is None:
        return tau
    return f"{tau}, {'the same image' if mine.read_bytes() == other.read_bytes() else 'another image'}"


def heatmaps(runs: Sequence[Run]) -> list[str]:
    """The first heatmaps of each run that has any."""
    found = {run.label: sorted(run.folder.glob("heatmap_*.png"))[:MOST_MAPS] for run in runs}
    return [section(f"Heatmaps: {name}", *(picture(path, path.stem) for path in own))
            for name, own in found.items() if own]  # fmt: skip


def maps(runs: Sequence[Run], target: Path) -> str:
    """Where each run's images were easy."""
    found = [(run.label, acceptance.average(run.folder)) for run in runs]
    plot = target.with_name(f"{target.stem}_acceptance.png")
    figures.acceptance([(name, own["maps"]) for name, own in found], plot)
    cells = table(report.acceptance_cells(found))
    return section(
        "Acceptance over the image", picture(plot, "maps of acceptance, depth, width, certainty"), cells
    )


def scores(runs: Sequence[Run]) -> str:
    """What the metrics say of the runs' images: the newest value of each score."""
    found, told = list[dict[str, float]](), dict[str, None]()
    for run in runs:
        newest = {name: entry for entry in read_scores(run.folder / SCORES) for name in entry["scores"]}
        found.append({name: entry["scores"][name] for name, entry in newest.items()})
        told |= {
            f"`{entry['line']}`, commit {entry['commit']}, {entry['date']}": None for entry in newest.values()
        }
    names = list(dict.fromkeys(name for own in found for name in own))
    rows = [["run", *names]]
    for run, own in zip(runs, found, strict=True):
        rows.append([run.label, *(f"{own[name]:.5g}" if name in own else "" for name in names)])
    return section("Scores", table(rows), *map(note, told))
