"""The race page: one HTML file that replays recordings side by side, without other files or a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from demo.recording import Recording

TEMPLATE, SCRIPT = (Path(__file__).with_name(name) for name in ("race.html", "race.js"))


def race_page(recordings: Sequence[Recording]) -> str:
    """Returns the page of a race as one HTML document. Text of the recordings never becomes markup."""
    runs = [{**asdict(recording), "seed": str(recording.seed)} for recording in recordings]
    # Seeds are strings because a number in JavaScript is exact only up to 2^53. "<" is escaped because
    # "</script>" in a prompt would end the script.
    data = json.dumps(runs).replace("<", "\\u003c")
    script = SCRIPT.read_text(encoding="utf-8").replace("/*RUNS*/[]", data)
    return TEMPLATE.read_text(encoding="utf-8").replace("/*SCRIPT*/", script)


def race_frame(recordings: Sequence[Recording]) -> str:
    """Returns the race page as an <iframe> of another page; its script fits the height to the content."""
    style = "width:100%;height:1100px;border:0;display:block"
    return f'<iframe title="Race" style="{style}" srcdoc="{escape(race_page(recordings))}"></iframe>'
