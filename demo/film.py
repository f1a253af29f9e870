"""The race as an animated WebP, for places that run no script, such as a README. Does not import torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from demo.recording import Recording

FRAMES_PER_SECOND = 12
MAX_SECONDS = 10  # a longer race is sped up to this length
HOLD_MS = 3000  # how long the last frame stays before the film starts again
SIDE, GAP, HEAD, FOOT = 240, 20, 34, 74  # of one pane, in pixels
INK, SOFT, PAPER, HOLE = "#1f2430", "#5b6473", "#ffffff", "#d3d7de"
TONES = ("#64748b", "#2563eb")  # colours of the progress bars of the first method and of all others


class Pane:
    """Paints one recording as it stood at a given time."""

    def __init__(self, recording: Recording, tone: str) -> None:
        self.recording, self.tone = recording, tone
        data = base64.b64decode(recording.frames["sheet"].partition(",")[2])
        self._sheet = Image.open(io.BytesIO(data)).convert("RGBA")

    def paint(self, canvas: Image.Image, left: int, seconds: float) -> None:
        """Paints picture, progress bar and counters `seconds` after the start, from x = left on."""
        recording, clock, calls = self.recording, 0.0, 0
        codes = 1  # the pass over the prompt gives the first code
        for step in recording.steps:
            clock += step["ms"] / 1e3
            if clock > seconds + 1e-9:
                break
            calls, codes = calls + 1, step["position"] + step["codes"]
        pen, size = ImageDraw.Draw(canvas), len(recording.codes)
        pen.text((left, 8), recording.method, INK, ImageFont.load_default(18))
        canvas.paste(HOLE, (left, HEAD, left + SIDE, HEAD + SIDE))
        picture = self._partial(codes)
        canvas.paste(picture, (left, HEAD), picture)
        below = HEAD + SIDE
        pen.rectangle((left, below + 6, left + SIDE, below + 10), HOLE)
        pen.rectangle((left, below + 6, left + SIDE * codes // size, below + 10), self.tone)
        progress = f"{codes} of {size} codes, {calls} target calls"
        pace = f"{min(seconds, recording.seconds):.2f} s, {(codes - 1) / max(calls, 1):.2f} codes per call"
        pen.text((left, below + 18), progress, SOFT, ImageFont.load_default(14))
        pen.text((left, below + 38), pace, INK, ImageFont.load_default(16))

    def _partial(self, codes: int) -> Image.Image:
        """Returns the last partial image with at most `codes` codes."""
        frames = self.recording.frames
        width, height = frames["size"]
        index = max(number for number, count in enumerate(frames["counts"]) if count <= codes)
        left, top = index % frames["columns"] * width, index // frames["columns"] * height
        picture = self._sheet.crop((left, top, left + width, top + height))
        return ImageOps.pad(picture, (SIDE, SIDE), Image.Resampling.BICUBIC, HOLE)


def film(recordings: Sequence[Recording]) -> bytes:
    """Returns the race as a looping WebP, in real time unless it lasts longer than MAX_SECONDS."""
    panes = [Pane(recording, TONES[min(index, 1)]) for index, recording in enumerate(recordings)]
    length = max(recording.seconds for recording in recordings)
    speed = max(1.0, length / MAX_SECONDS)
    count = max(2, round(length / speed * FRAMES_PER_SECOND))
    frames = [still(panes, length * index / count, speed) for index in range(count + 1)]
    durations = [round(1000 / FRAMES_PER_SECOND)] * count + [HOLD_MS]
    stream = io.BytesIO()
    frames[0].save(
        stream, format="WEBP", save_all=True, append_images=frames[1:], loop=0, quality=80, method=4,
        duration=durations,
    )  # fmt: skip
    return stream.getvalue()


def still(panes: Sequence[Pane], seconds: float, speed: float) -> Image.Image:
    """Returns one frame: all panes side by side, `seconds` after the start of the race."""
    canvas = Image.new("RGB", (GAP + len(panes) * (SIDE + GAP), HEAD + SIDE + FOOT), PAPER)
    for index, pane in enumerate(panes):
        pane.paint(canvas, GAP + index * (SIDE + GAP), seconds)
    if speed > 1.01:
        text = f"{speed:.1f} times real time"
        ImageDraw.Draw(canvas).text((GAP, HEAD + SIDE + FOOT - 16), text, SOFT, ImageFont.load_default(11))
    return canvas
