"""Markdown: tables, and documents that keep a place for them between markers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.errors import UserError
from eval.outputs import write_atomic


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells, headings first; the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def insert(document: Path, name: str, text: str) -> None:
    """Replace what stands between a document's markers. UserError if it has none of that name."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    try:
        before = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--into {document}: {error.strerror}") from None
    head, found, rest = before.partition(first)
    _, closed, tail = rest.partition(last)
    if not (found and closed):
        raise UserError(f"--into {document}: it has no lines {first} and {last}")
    write_atomic(document, f"{head}{first}\n{text}\n{last}{tail}".encode())
