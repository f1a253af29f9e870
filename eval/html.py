"""HTML that needs nothing else: documents with their style in them, tables, pictures as data. No torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

# Light or dark as the visitor's machine has it; in a frame, as the page around it has it.
STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1f2430, #e8eaf0); --soft: light-dark(#5b6473, #a3abba);
        --line: light-dark(#d9dde5, #3a4150); --card: light-dark(#f6f7f9, #1f232b) }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
       max-width: 75em; margin: 0 auto; padding: 12px }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin: 1.6em 0 .4em }
p { margin: .3em 0; overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line) }
td { white-space: nowrap } th:first-child, td:first-child, .gallery * { text-align: left }
td.text { white-space: normal; min-width: 8em; max-width: 16em; overflow-wrap: anywhere }
.plot { max-width: 100% } .tile { width: 128px; display: block } .wide { overflow-x: auto }
.note, small { color: var(--soft); font-size: .9em }
"""


def document(title: str, content: str) -> str:
    """A whole page. Its icon is empty data, so that no browser asks for one."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style>\n{content}\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *parts, "</section>"])


def note(text: str) -> str:
    """Small print; what stands between backquotes is a command."""
    shown = re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
    return f'<p class="note">{shown}</p>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Plain text in cells, the first row as heading."""
    head, *body = rows
    lines = [_row(head, "th"), *(_row(row, "td") for row in body)]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(cells: Sequence[str], tag: str) -> str:
    """A row of plain text."""
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def gallery(head: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[Path | None, str]]]]) -> str:
    """Pictures side by side: a row per prompt, a column per run, a line under each. None: no picture."""
    lines = [_row(["prompt", *head], "th")]
    for text, tiles in rows:
        cells = "".join(
            f"<td>{picture(path, text, 'tile') if path else ''}<small>{escape(below)}</small></td>"
            for path, below in tiles
        )
        lines.append(f'<tr><td class="text">{escape(text)}</td>{cells}</tr>')
    return '<div class="wide"><table class="gallery">\n' + "\n".join(lines) + "\n</table></div>"


def picture(path: Path, text: str, kind: str = "plot") -> str:
    """A PNG as part of the page."""
    shown, data = escape(text[:200], quote=True), data_uri("png", path.read_bytes())
    return f'<img class="{kind}" alt="{shown}" src="{data}">'


def data_uri(kind: str, content: bytes) -> str:
    """A picture's bytes as the address of itself."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
