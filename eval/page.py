"""One HTML page that needs nothing else: styles and pictures are part of it, it runs no script. No torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

CODE = r"<code>\1</code>"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #eee; vertical-align: top }
th { border-bottom: 1px solid #888 } th:first-child, td:first-child, .gallery * { text-align: left }
td { white-space: nowrap } td.text { white-space: normal; text-align: left; max-width: 16em }
img.plot { max-width: 100% } img.tile { width: 128px; image-rendering: auto; display: block }
p.note, td small { color: #666; font-size: .85em }
p.note, td.text { overflow-wrap: anywhere }
.wide { overflow-x: auto }
"""


def document(title: str, sections: Sequence[str]) -> str:
    """A whole page. Its icon is empty data, so that no browser asks for one."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *parts, "</section>"])


def note(text: str) -> str:
    """Small print; what stands between backquotes is a command."""
    return f'<p class="note">{re.sub("`([^`]*)`", CODE, escape(text))}</p>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Plain text in cells, the first row as heading."""
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def gallery(head: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[Path | None, str]]]]) -> str:
    """Pictures side by side: a row a prompt, a column an arm, a line of text under each. None: no picture."""
    lines = ["<tr><th>prompt</th>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for text, tiles in rows:
        cells = "".join(
            f"<td>{picture(path, text, 'tile') if path else ''}<small>{escape(below)}</small></td>"
            for path, below in tiles
        )
        lines.append(f'<tr><td class="text">{escape(text)}</td>{cells}</tr>')
    return '<div class="wide"><table class="gallery">\n' + "\n".join(lines) + "\n</table></div>"


def picture(path: Path, text: str, kind: str = "plot") -> str:
    """A PNG as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="{kind}" alt="{escape(text[:200], quote=True)}" src="data:image/png;base64,{data}">'
