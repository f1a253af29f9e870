"""report: turns results of bench and generate_images into tables, documents, plots or a race.

With --check it checks folders of generate_images instead, with --export_geneval or --export_dpg it writes
their images as those scorers read them.

This command does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError
from eval import acceptance, tables
from eval.document import SECTIONS, document
from eval.metrics.scores import SCORES, newest_scores
from models.checkpoint.files import write_atomic
from storage import export
from storage.command_line import CommandOptions, as_written, declare, option, positional
from storage.run_folder import RECORDS, stored_options, stored_run

Results = Mapping[Path, dict[str, Any]]  # results of bench by their files
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
EXPORTS = {"export_geneval": export.geneval, "export_dpg": export.dpg}
OUTPUTS = ("write", "into", "figures", "race", "check", *EXPORTS)  # of which one command makes one


@declare("report")
class Options(CommandOptions):
    """The results, and what is made of them: one of OUTPUTS, or printed tables."""

    results: tuple[str, ...] = positional(
        "JSON files or folders of bench: prints their tables; folders of generate_images: prints codes per "
        "call, their correlation with the top-1 probability, and scores of evaluate (default, with --write: "
        "docs/results/*.json)",
        "RESULT",
    )
    write: str | None = option(
        "write docs/RESULTS.md: the tables of the results named " + ", ".join(s.files for s in SECTIONS),
        unit="FILE",
    )
    into: str | None = option(
        "put the short table (some methods at the highest temperature) into a document, between "
        "<!-- NAME:start --> and <!-- NAME:end -->; NAME is the result's file name without suffix",
        unit="FILE",
    )
    figures: str | None = option(
        "write plots as PNG: NAME_speed.png for each bench result, NAME_frontier_T.png for each temperature "
        "of those that measured quality, and acceptance.png, which maps codes per call and trees over the "
        "image",
        unit="DIR",
    )
    race: str | None = option(
        "replay the first image that all folders recorded (generate_images --record): .html for one page "
        "that needs nothing else, .webp for an animation",
        unit="FILE",
    )
    paper: str | None = option(
        "print a table for each rule of verification beside the ADT-Tree paper's figures for Anole-7b, "
        "from its table of this name",
        choices=tuple(tables.PAPER),
    )
    check: bool = option(
        "check the folders of generate_images: name every record and picture that their configuration "
        "asks for and that is missing or damaged, and end with status 1 if there is one",
        False,
    )
    export_geneval: str | None = option(
        "write GenEval's folder from a run of the whole evaluation_metadata.jsonl, made with "
        "--images_per_prompt 4",
        unit="DIR",
    )
    export_dpg: str | None = option(
        "write DPG-Bench's folder from a run of its whole folder of prompts, made with --images_per_prompt 4",
        unit="DIR",
    )

    @property
    def outputs(self) -> list[str]:
        """The options of OUTPUTS that are given."""
        return [name for name in OUTPUTS if as_written(self, name)]

    def unread(self) -> dict[str, str]:
        """Returns the outputs after the first, and the paper's figures, which only printed tables show."""
        first, *others = *self.outputs, "paper"
        return dict.fromkeys(others, f"it does not go with {as_written(self, first)}")


def run(options: Options) -> None:
    """Prints the tables, checks the folders, or writes the files of the output option."""
    outputs = options.outputs
    if not options.results and options.write is None:
        raise UserError("no RESULT: give a JSON file of bench, its folder, or a folder of generate_images")
    if options.check:
        check_runs([Path(name) for name in options.results])
        return
    if outputs and outputs[0] in EXPORTS:
        export_run(options, outputs[0])
        return
    paths = [Path(name) for name in options.results]
    if options.write is not None and not paths:
        paths = [path for section in SECTIONS for path in sorted(RESULTS.glob(section.files))]
    files, runs = sort_results(paths)
    listed = [path for path in files if any(path.match(section.files) for section in SECTIONS)]
    shown = {"write": listed, "into": files, "race": runs}.get(outputs[0] if outputs else "", [*files, *runs])
    if ignored := [path for path in (*files, *runs) if path not in shown]:
        raise UserError(f"{ignored[0]}: {as_written(options, outputs[0])} does not show it; leave it out")
    if options.paper is not None and not files:
        raise UserError(f"--paper {options.paper}: there is no result of bench; leave it out")
    results = {path: tables.read(path) for path in files}
    if options.write is not None:
        save(Path(options.write), document(results).encode())
    elif options.into is not None:
        for path, result in results.items():
            tables.insert(Path(options.into), path.stem, tables.short(result))
    elif options.figures is not None:
        write_figures(Path(options.figures), results, runs)
    elif options.race is not None:
        write_race(Path(options.race), runs)
    else:
        print_tables(results, runs, options.paper)


def check_runs(roots: Sequence[Path]) -> None:
    """Prints one line for each complete run and one for each missing or damaged file of the others.

    Ends the command with status 1 if a file is missing or damaged.
    """
    complete = True
    for root in roots:
        folder = stored_run(root, stored_options(root))
        lines = [str(error) for _, error in folder.faults(folder.prompts)]
        print("\n".join(lines) or f"{root}: all {len(folder.prompts)} images of its configuration are there")
        complete &= not lines
    if not complete:
        sys.exit(1)


def export_run(options: Options, output: str) -> None:
    """Writes a scorer's folder, of one of EXPORTS, and prints the scorer's command."""
    if len(options.results) != 1:
        raise UserError(f"{as_written(options, output)}: give one folder of generate_images")
    command = EXPORTS[output](Path(options.results[0]), Path(getattr(options, output)))
    print(f"score it by {command}")


def sort_results(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Splits paths into result files of bench and folders of generate_images.

    Raises UserError for a folder that is neither.
    """
    results, runs = [], []
    for path in paths:
        stored = path / tables.STORED if path.is_dir() else path
        if not path.is_dir() or stored.is_file():
            results.append(stored)
        elif (path / RECORDS).is_dir():
            runs.append(path)
        else:
            raise UserError(f"{path} holds neither {tables.STORED} nor a run of generate_images")
    return results, runs


def print_tables(results: Results, runs: Sequence[Path], paper: str | None) -> None:
    """Prints a table per result, one of all runs, and one of their scores if any was measured."""
    texts = [tables.text_of(result, paper) for result in results.values()]
    if runs:
        texts.append(tables.table(acceptance_line(path) for path in runs))
    scores = {path: newest for path in runs if (newest := newest_scores(path / SCORES))}
    if scores:
        texts.append(tables.table(
            {"run": str(path), **{name: f"{value:.5g}" for name, value in newest.items()}}
            for path, newest in scores.items()
        ))  # fmt: skip
    print("\n\n".join(texts))


def acceptance_line(run: Path) -> dict[str, str]:
    """Returns the line of a run of generate_images."""
    average = acceptance.average(run)
    correlation = average["correlation"]
    return {
        "run": str(run),
        "images": str(average["images"]),
        "codes per call": f"{average['codes_per_call']:.2f}",
        "correlation with top-1 probability": "-" if correlation is None else f"{correlation:.2f}",
    }


def write_figures(folder: Path, results: Results, runs: Sequence[Path]) -> None:
    """Writes the speed plot of each bench result, its quality plot for each temperature, and one plot with
    the averaged maps of all runs."""
    from eval import figures

    averages = [(str(path), acceptance.average(path)["maps"]) for path in runs]
    if without := [path for path, maps in averages if not maps]:
        raise UserError(f"{without[0]}: several rows at once have no maps; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    for path, result in results.items():
        rows, name = result["rows"], name_of(path)
        figures.speed(rows, [tables.label(row, rows) for row in rows], folder / f"{name}_speed.png")
        scored = all("nll" in row for row in rows)
        for temperature in dict.fromkeys(row["temperature"] for row in rows if scored):
            points = [row for row in rows if row["temperature"] == temperature]
            curves = [tables.curve(row, points) for row in points]
            figures.frontier(points, curves, folder / f"{name}_frontier_{temperature:g}.png")
    if averages:
        figures.acceptance(averages, folder / "acceptance.png")
    print(f"{folder}: figures written")


def name_of(result: Path) -> str:
    """Returns the name of a bench result: "a" for a.json, and "a" for a/bench.json too."""
    return result.parent.resolve().name if result.name == tables.STORED else result.stem


def write_race(target: Path, runs: Sequence[Path]) -> None:
    """Writes the race of the runs' first recorded image. Raises UserError if there is none."""
    from demo.film import film
    from demo.race_page import race_page
    from demo.recording import Recording, races

    def page(recordings: Sequence[Recording]) -> bytes:
        return race_page(recordings).encode()

    formats: dict[str, Callable[[Sequence[Recording]], bytes]] = {".html": page, ".webp": film}
    if target.suffix not in formats:
        raise UserError(f"--race {target}: give a name that ends in .html or .webp")
    recorded = races(runs)
    if not recorded:
        raise UserError("--race: the folders share no recording; make them by generate_images --record 1")
    save(target, formats[target.suffix](recorded[0]))


def save(target: Path, content: bytes) -> None:
    """Writes a file, and its folder where there is none, and prints its size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    print(f"{target}: {len(content)} bytes")
