"""A race as an animated WebP, for places that run no script. No torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from adt_tree.errors import UserError
from eval.race import Recording
from models.checkpoint.files import write_atomic

PER_SECOND, MOST_SECONDS, HOLD_MS = 12, 10, 3000  # pictures a second, a longer race is sped up, the end stays
SIDE, GAP, HEAD, FOOT = 240, 20, 34, 74  # of a pane, in pixels
INK, SOFT, PAPER, HOLE = "#1f2430", "#5b6473", "#ffffff", "#d3d7de"
TONES = ("#64748b", "#2563eb")


class Pane:
    """One recording, painted as it was at any time."""

    def __init__(self, recording: Recording, tone: str) -> None:
        self.recording, self.tone = recording, tone
        data = base64.b64decode(recording.frames["sheet"].partition(",")[2])
        self._sheet = Image.open(io.BytesIO(data)).convert("RGBA")

    def paint(self, canvas: Image.Image, left: int, seconds: float) -> None:
        """Picture, bar and counters `seconds` after the start."""
        recording, clock, calls, codes = self.recording, 0.0, 0, 1
        for step in recording.steps:
            clock += step["ms"] / 1e3
            if clock > seconds + 1e-9:
                break
            calls, codes = calls + 1, step["position"] + step["accepted"] + 1
        pen, size = ImageDraw.Draw(canvas), len(recording.codes)
        pen.text((left, 8), recording.method, INK, ImageFont.load_default(18))
        canvas.paste(HOLE, (left, HEAD, left + SIDE, HEAD + SIDE))
        picture = self._picture(codes)
        canvas.paste(picture, (left, HEAD), picture)
        below = HEAD + SIDE
        pen.rectangle((left, below + 6, left + SIDE, below + 10), HOLE)
        pen.rectangle((left, below + 6, left + SIDE * codes // size, below + 10), self.tone)
        shown = min(seconds, recording.seconds)
        progress = f"{codes} of {size} codes, {calls} target calls"
        pace = f"{shown:.2f} s, {(codes - 1) / max(calls, 1):.2f} codes per call"
        pen.text((left, below + 18), progress, SOFT, ImageFont.load_default(14))
        pen.text((left, below + 38), pace, INK, ImageFont.load_default(16))

    def _picture(self, codes: int) -> Image.Image:
        """The last partial image of no more codes than these."""
        frames = self.recording.frames
        wide, high = frames["size"]
        place = max(number for number, count in enumerate(frames["counts"]) if count <= max(codes, 1))
        left, top = place % frames["columns"] * wide, place // frames["columns"] * high
        picture = self._sheet.crop((left, top, left + wide, top + high))
        return picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def film(recordings: Sequence[Recording], path: Path) -> int:
    """Write the race as one looping file, in real time unless it is longer than MOST_SECONDS; its bytes.

    UserError for another suffix than .webp.
    """
    if path.suffix.lower() != ".webp":
        raise UserError(f"--animation {path}: give a name that ends in .webp")
    panes = [Pane(one, TONES[min(place, 1)]) for place, one in enumerate(recordings)]
    length = max(one.seconds for one in recordings)
    speed = max(1.0, length / MOST_SECONDS)
    count = max(2, round(length / speed * PER_SECOND))
    pictures = [still(panes, length * place / count, speed) for place in range(count + 1)]
    stream = io.BytesIO()
    pictures[0].save(
        stream, format="WEBP", save_all=True, append_images=pictures[1:], loop=0, quality=80, method=4,
        duration=[round(1000 / PER_SECOND)] * count + [HOLD_MS],
    )  # fmt: skip
    write_atomic(path, stream.getvalue())
    return len(stream.getvalue())


def still(panes: Sequence[Pane], seconds: float, speed: float) -> Image.Image:
    """All panes at one time, on white."""
    wide = GAP + len(panes) * (SIDE + GAP)
    canvas = Image.new("RGB", (wide, HEAD + SIDE + FOOT), PAPER)
    for place, pane in enumerate(panes):
        pane.paint(canvas, GAP + place * (SIDE + GAP), seconds)
    if speed > 1.01:
        text = f"{speed:.1f} times real time"
        ImageDraw.Draw(canvas).text((GAP, HEAD + SIDE + FOOT - 16), text, SOFT, ImageFont.load_default(11))
    return canvas
