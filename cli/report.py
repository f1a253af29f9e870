"""report: stored results of bench and folders of generate_images -> tables, documents, a page. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adt_tree.errors import UserError
from cli.parser import Options as Base
from cli.parser import declare, option, positional
from eval import acceptance, report
from eval.runs.run_folder import finished_records
from models.checkpoint.files import make_folder, write_atomic

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


@declare
class Options(Base):
    """report"""

    results: tuple[str, ...] = positional(
        "JSON files that bench stored or their folders, printed as tables; folders of generate_images, of "
        "which codes per call and their correlation with top-1 probability are told (default, with --write: "
        "docs/results/*.json)",
        "RESULT",
    )
    write: str | None = option("write all tables of bench's results to a document of their own", unit="FILE")
    into: str | None = option(
        "put the short table (tau and speed-up by temperature) into a document, between <!-- NAME:start --> "
        "and <!-- NAME:end -->; NAME is the result's file name without suffix",
        unit="FILE",
    )
    html: str | None = option(
        "write one self-contained page, its plots as PNG beside it: tables, the runs' images side by side, "
        "heatmaps, maps of acceptance, scores, races of what was made with --record",
        unit="FILE",
    )
    animation: str | None = option("write the first race as an animated .webp", unit="FILE")
    paper: str | None = option(
        "set the ADT-Tree paper's figures for Anole-7b beside ours, of its table of that name",
        choices=tuple(report.PAPER),
    )


def run(options: Options) -> None:
    """Print the tables, or put them where the options say."""
    given = [name for name in ("write", "into", "html", "animation") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]}: give one of them")
    if not options.results and not options.write:
        raise UserError(
            "no RESULT: give a JSON file that bench stored, its folder, or one of generate_images"
        )
    tables, runs = sorted_out([Path(name) for name in options.results] or sorted(RESULTS.glob("*.json")))
    if options.html is not None:
        from eval import page

        target = Path(options.html)
        print(f"{target}: {page.write(target, tables, runs, options.paper)} sections")
    elif options.animation is not None:
        animate(Path(options.animation), runs)
    elif options.write is not None:
        make_folder(Path(options.write).parent)
        write_atomic(Path(options.write), report.document(tables).encode())
        print(f"{options.write}: {len(tables)} results")
    elif options.into is not None:
        for path in tables:
            report.insert(Path(options.into), path.stem, report.short(report.read(path)))
    else:
        print("\n\n".join(report.text_of(report.read(path), options.paper) for path in tables))
        if runs:
            print(
                report.markdown(
                    report.acceptance_cells([(str(path), acceptance.average(path)) for path in runs])
                )
            )


def animate(target: Path, runs: Sequence[Path]) -> None:
    """Write the runs' first race as a moving picture. UserError if none of them was made with --record."""
    from eval.race import races
    from eval.race_film import film

    found = races(runs)
    if not found:
        raise UserError("--animation: no race to show; make the folders by generate_images --record 1")
    make_folder(target.parent)
    print(f"{target}: {film(found[0], target)} bytes")


def sorted_out(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Results of bench, and folders of generate_images. UserError for a folder that is neither."""
    tables, runs = [], []
    for path in paths:
        stored = path / report.STORED if path.is_dir() else path
        if not path.is_dir() or stored.is_file():
            tables.append(stored)
        elif any(path.glob("global_statistics_*.json")) or finished_records(path):
            runs.append(path)
        else:
            raise UserError(f"{path}: it holds neither {report.STORED} nor a run of generate_images")
    return tables, runs
