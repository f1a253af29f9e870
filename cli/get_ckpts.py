"""get_ckpts: fetches published checkpoints into ckpts/, in the published layout. A second call resumes an
interrupted download. Without a NAME it prints the table of what is published, or writes it into a file."""

from __future__ import annotations

import sys
from pathlib import Path

from adt_tree.errors import CheckpointError
from eval.tables import insert, markdown
from models.published import Source
from models.registry import LIQUID, SOURCES
from storage.command_line import CommandOptions, declare, option, positional

COLUMNS = ["name", "part", "from", "below `ckpts/`", "size", "licence"]
MARK = "get_ckpts"  # name of the marks in ckpts/README.md


def _readers(reads: str) -> str:
    """Returns the names that have a source with a value of this field."""
    return ", ".join(name for name, parts in SOURCES.items() if any(getattr(part, reads) for part in parts))


def _read_by(name: str) -> list[str]:
    parts = SOURCES[name]
    read = {"file": any(part.choices for part in parts), "pixels": any(part.optional for part in parts)}
    return ["revision", *(name for name, reads in read.items() if reads)]


@declare("checkpoints")
class Options(CommandOptions):
    """Which checkpoints are fetched, or where their table goes."""

    names: tuple[str, ...] = positional(
        f"checkpoints, among {', '.join(SOURCES)} (default: none; prints what each consists of)",
        "NAME",
        choices=tuple(SOURCES),
        reads={False: ("into",), **{name: _read_by(name) for name in SOURCES}},
    )
    revision: str | None = option(
        "branch, tag or commit of the target's repository (default: its default branch)", unit="REV"
    )
    file: str | None = option(
        f"{_readers('choices')}: the file of another model than the default one", unit="FILE"
    )
    into: str | None = option(
        "write the table between the marks of a document, as of ckpts/README.md", unit="FILE"
    )
    pixels: bool = option(f"{_readers('optional')}: also fetch what makes pixels of codes", False)


def run(options: Options) -> None:
    """Fetches each checkpoint part by part, and prints places and licences; or prints or writes the table."""
    if options.into is not None:
        insert(Path(options.into), MARK, table())
    elif not options.names:
        print(table())
    for name in options.names:
        target = SOURCES[name][0]
        for source in SOURCES[name]:
            if source.form:
                ask_for(source)
            elif options.pixels or not source.optional:
                revision = options.revision if source.hub == target.hub else None
                download(source, revision, options.file)
                print(f"{name}: {source.part}: {source.folder}, licence: {source.licence}")


def download(source: Source, revision: str | None, file: str | None) -> None:
    """Fetches the files of a source into its folder. file: of its choices; None: the first.

    Raises CheckpointError if they cannot be fetched, or if the repository has no file of a name.
    """
    from models.checkpoint.hub import HubId, fetch

    files = (file or source.choices[0],) if source.choices else source.files
    fetch(HubId(source.hub, revision, None), files, into=source.folder, space=source.space)
    for name in files:
        if next(source.folder.glob(name), None) is None:
            raise CheckpointError(f"{source.hub}: the repository has no {name}; give another REVISION")


def ask_for(source: Source) -> None:
    """Says on stderr how to get files that cannot be fetched, unless they are there."""
    copy, home = LIQUID.beside[0], source.folder.parents[1]
    if all((source.folder / name).exists() for name in source.files):
        return
    print(
        f"get_ckpts: put {', '.join(source.files)} into {source.folder}: the form at {source.form} sends a "
        f"link by mail. Liquid's authors publish a copy of the VQGAN, under the {copy.licence}: "
        f".venv/bin/hf download {copy.hub} --repo-type space --local-dir {home} {' '.join(copy.files)}",
        file=sys.stderr,
    )


def table() -> str:
    """Returns the Markdown table of everything that is published, a row for each part."""
    names: dict[Source, list[str]] = {}  # a part may serve several
    for name, parts in SOURCES.items():
        for source in parts:
            names.setdefault(source, []).append(f"`{name}`")
    rows = [
        [", ".join(users), source.part, origin(source), f"`{source.place}`", source.size, source.licence]
        for source, users in names.items()
    ]
    return markdown([COLUMNS, *rows]).replace("---:", "---")  # texts, not numbers


def origin(source: Source) -> str:
    """Returns where a part comes from, in Markdown."""
    if source.form:
        return f"Meta, by a [form]({source.form}), or a copy (below)"
    place = f"{'space ' if source.space else ''}`{source.hub}`"
    files = ", ".join(f"`{name}`" for name in source.files or source.choices)
    listed = f": {'one of ' if source.choices else ''}{files}" if files else ""
    also = f"; also {source.also}" if source.also else ""
    return f"{place}{listed}{also}{', by `PIXELS=1`' if source.optional else ''}"
