"""An image's decoding as a recording, and recordings as a race: one page that needs nothing else.

A recording holds every step's clock, codes and draft tree, and the partial images after some of them. The
clocks are those of the loop, so that whoever watches it costs it nothing. No torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageChops, ImageDraw

from adt_tree.errors import UserError
from eval.html import data_uri, document
from models.checkpoint.files import write_atomic

if TYPE_CHECKING:
    from adt_tree.method import Method
    from adt_tree.pipeline import Pipeline, StreamStep

PREFIX = "race_"  # of a recording's file in a folder of generate_images
TITLE, TEMPLATE = "Race of decoding methods", Path(__file__).with_name("race.html")
MOST_FRAMES, MOST_SIDE = 48, 256  # partial images kept, and pixels of their longer side
COLUMNS = 8  # of the sheet they lie on
STEP_FIELDS = ("position", "row", "column", "depth", "width", "nodes", "accepted", "ms")
NUMBERS = (int, float)


@dataclass(frozen=True, slots=True)
class Recording:
    """One image's decoding, step by step."""

    method: str
    exact: bool  # whether the method gives the AR baseline's image
    prompt: str
    seed: int
    settings: str  # what else determines the image, for a reader
    grid: tuple[int, int]  # rows, columns
    seconds: float  # of all steps; the prompt's pass is not in it
    codes: list[int]
    pixels: str  # hash of the finished image
    steps: list[dict[str, Any]]  # STEP_FIELDS, and tree: None or codes, parents, depths, probability, path
    frames: dict[str, Any]  # sheet (WebP as a data URI), columns, size, counts: codes on each partial image


class Recorder:
    """Collects the steps of one image from Pipeline.stream."""

    def __init__(self, pipe: Pipeline, method: Method, prompt: str, seed: int) -> None:
        self.pipe, self.method, self.prompt, self.seed = pipe, method, prompt, seed
        self.grid = pipe.model.grid
        self.codes: list[int] = []
        self.steps: list[dict[str, Any]] = []

    def add(self, step: StreamStep) -> None:
        """Keep what a step did. The first root is the image's first code, which the prompt's pass gave."""
        if not self.codes and step.position:
            self.codes = [step.tree.codes[0]]
        self.codes += step.codes
        values = asdict(step.step)
        tree = None
        if len(step.tree.codes) > 1:
            tree = {key: list(getattr(step.tree, key)) for key in ("codes", "parents", "depths", "path")}
            tree["probability"] = [round(math.exp(value), 4) for value in step.tree.confidence]
        self.steps.append({**{name: values[name] for name in STEP_FIELDS}, "tree": tree})

    @property
    def done(self) -> bool:
        """Whether the image is complete."""
        return len(self.codes) >= self.grid.size

    @property
    def tau(self) -> float:
        """Codes per target call; the image's first code is the prompt's."""
        return (len(self.codes) - 1) / max(len(self.steps), 1)

    def finish(self) -> Recording:
        """The recording; partial images are decoded now, so that no clock runs meanwhile."""
        final = self.pipe.image(self.codes)
        sampling = self.method.sampling
        return Recording(
            method=self.method.label,
            exact=self.method.exact,
            prompt=self.prompt,
            seed=self.seed,
            settings=f"Temperature {sampling.temperature:g}, guidance {sampling.guidance:g}",
            grid=(self.grid.height, self.grid.width),
            seconds=sum(step["ms"] for step in self.steps) / 1e3,
            codes=list(self.codes),
            pixels=hashlib.sha256(final.tobytes()).hexdigest()[:16],
            steps=self.steps,
            frames=self._frames(final),
        )

    def _frames(self, final: Image.Image) -> dict[str, Any]:
        """The image after some steps, evenly spread and the last among them, on one sheet."""
        ends = [step["position"] + step["accepted"] + 1 for step in self.steps]
        every = -(-len(ends) // MOST_FRAMES)
        counts = [1, *ends[len(ends) - 1 :: -every][::-1]]
        shrink = min(1.0, MOST_SIDE / max(final.size))
        size = (round(final.width * shrink), round(final.height * shrink))
        sheet = Image.new("RGBA", (COLUMNS * size[0], -(-len(counts) // COLUMNS) * size[1]))
        for place, count in enumerate(counts):
            picture = final.convert("RGBA") if count == self.grid.size else self._partial(count)
            sheet.paste(picture.resize(size), (place % COLUMNS * size[0], place // COLUMNS * size[1]))
        stream = io.BytesIO()
        sheet.save(stream, format="WEBP", quality=90)
        sheet_uri = data_uri("webp", stream.getvalue())
        return {"sheet": sheet_uri, "columns": COLUMNS, "size": list(size), "counts": counts}

    def _partial(self, count: int) -> Image.Image:
        """The first codes decoded, then transparent. The decoder needs a whole grid and normalises over it:
        the codes are repeated to fill it."""
        known = self.codes[:count]
        picture = self.pipe.image((known * self.grid.size)[: self.grid.size]).convert("RGBA")
        row, column = self.grid.cell(count)
        high, wide = picture.height / self.grid.height, picture.width / self.grid.width
        mask = Image.new("L", picture.size, 255)
        pen = ImageDraw.Draw(mask)
        below, beside = round(row * high), round(column * wide)
        pen.rectangle((beside, below, picture.width, round((row + 1) * high) - 1), fill=0)
        pen.rectangle((0, round((row + 1) * high), picture.width, picture.height), fill=0)
        picture.putalpha(ImageChops.multiply(picture.getchannel("A"), mask))
        return picture


def record(pipe: Pipeline, method: Method, prompt: str, seed: int) -> Recording:
    """Decode one image alone and record it."""
    recorder = Recorder(pipe, method, prompt, seed)
    for step in pipe.stream(prompt, method=method, seed=seed):
        recorder.add(step)
    return recorder.finish()


def write(path: Path, recording: Recording) -> None:
    """Keep a recording as JSON, whole or not at all."""
    write_atomic(path, json.dumps(asdict(recording)).encode())


def read(path: Path) -> Recording:
    """A recording of generate_images --record. UserError, one line, if it is not one."""
    try:
        recording = Recording(**json.loads(path.read_text(encoding="utf-8")))
        _check(recording)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{path}: damaged, or no recording; delete it and make it again") from None
    return recording


def _check(recording: Recording) -> None:
    """ValueError, TypeError or KeyError for a recording that could not be replayed."""
    size = recording.grid[0] * recording.grid[1]
    frames = recording.frames
    numbers = (recording.seconds, *frames["size"], *frames["counts"])
    known = all(isinstance(step[name], NUMBERS) for step in recording.steps for name in STEP_FIELDS)
    texts = (recording.method, recording.prompt, recording.settings, recording.pixels, frames["sheet"])
    if not (
        known and recording.steps and size == len(recording.codes)
        and all(isinstance(number, NUMBERS) for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and frames["sheet"].startswith("data:image/webp;base64,")
    ):  # fmt: skip
        raise ValueError("not a recording")


def races(folders: Sequence[Path]) -> list[list[Recording]]:
    """What folders of generate_images recorded: a race for each image of which all that recorded have one."""
    found = [{path.name: path for path in folder.glob(f"{PREFIX}*.json")} for folder in folders]
    found = [own for own in found if own]
    names = sorted(set.intersection(*map(set, found))) if found else []
    return [[read(own[name]) for own in found] for name in names]


def race_html(recordings: Sequence[Recording]) -> str:
    """A page of its own on which the recordings race and every step can be looked into."""
    runs = [{**asdict(one), "seed": str(one.seed)} for one in recordings]  # numbers of a page end at 2^53
    data = json.dumps(runs).replace("<", "\\u003c")
    return document(TITLE, TEMPLATE.read_text(encoding="utf-8").replace("/*RUNS*/[]", data))


def embedded(recordings: Sequence[Recording]) -> str:
    """The race as a part of another page: a frame of its own, as high as what it holds."""
    style = "width:100%;height:1100px;border:0;display:block"
    page = escape(race_html(recordings))
    return f'<iframe title="{TITLE}" style="{style}" srcdoc="{page}"></iframe>'
