"""Records how one image is decoded: the time, codes and draft tree of every step, and partial images.

Recording costs the decoding nothing: the times are those that the decoding loop measures itself, and the
partial images are decoded after the last step. This file does not import torch.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from models.checkpoint.files import read_json, reading, write_atomic

if TYPE_CHECKING:
    from adt_tree.method import Method
    from adt_tree.pipeline import Pipeline, StreamStep

PREFIX = "race_"  # a folder of generate_images keeps the recording of image NAME as race_NAME.json
MAX_FRAMES, MAX_SIDE = 48, 256  # number of partial images in a recording, and their longer side in pixels
COLUMNS = 8  # partial images per row of the sheet
SHEET_START = "data:image/webp;base64,"
STEP_FIELDS = ("row", "column", "depth", "width", "nodes", "accepted", "ms")


@dataclass(frozen=True, slots=True)
class Recording:
    """The decoding of one image, step by step."""

    method: str
    why: str  # why it may give another image than the AR baseline; empty for exact methods
    prompt: str
    seed: int
    settings: str  # temperature and guidance, as a sentence for the reader
    grid: tuple[int, int]  # rows and columns
    seconds: float  # sum of all steps; the pass over the prompt is not included
    codes: list[int]
    pixels: str  # hash of the finished image's pixels
    # STEP_FIELDS; position, codes: number of the first committed code, and how many the step committed; and
    # tree: None or codes, parents, depths, probability, path.
    steps: list[dict[str, Any]]
    frames: dict[str, Any]  # sheet (a WebP as data URI), columns, size, counts: number of codes in each frame


def record(pipe: Pipeline, method: Method, prompt: str, seed: int) -> Recording:
    """Decodes one image at batch size 1 and returns its recording."""
    return recording_of(pipe, method, prompt, seed, list(pipe.stream(prompt, method=method, seed=seed)))


def recording_of(
    pipe: Pipeline, method: Method, prompt: str, seed: int, stream: Sequence[StreamStep]
) -> Recording:
    """Returns the recording of a complete image, whose steps Pipeline.stream gave. Decodes the partial
    images, which takes a while."""
    codes = [code for step in stream for code in step.codes]
    if stream[0].position:
        codes.insert(0, stream[0].tree.codes[0])  # from the pass over the prompt: the first tree's root
    steps, final, sampling = [_as_dict(step) for step in stream], pipe.image(codes), method.sampling
    return Recording(
        method=method.label,
        why=why_inexact(method),
        prompt=prompt,
        seed=seed,
        settings=f"Temperature {sampling.temperature:g}, guidance {sampling.guidance:g}",
        grid=(pipe.model.grid.height, pipe.model.grid.width),
        seconds=sum(step["ms"] for step in steps) / 1e3,
        codes=codes,
        pixels=hashlib.sha256(final.tobytes()).hexdigest()[:16],
        steps=steps,
        frames=_frames(pipe, codes, steps, final),
    )


def why_inexact(method: Method) -> str:
    """Returns why the method may give another image than the AR baseline; nothing for an exact one."""
    if method.exact:
        return ""
    if method.lantern:
        return "LANTERN also accepts codes that look alike"
    return method.spec.about if method.verify == "coupled" else "rejection uses other random numbers"


def _as_dict(step: StreamStep) -> dict[str, Any]:
    tree = None
    if len(step.tree.codes) > 1:
        tree = {key: list(getattr(step.tree, key)) for key in ("codes", "parents", "depths", "path")}
        tree["probability"] = [round(math.exp(value), 4) for value in step.tree.confidence]
    committed = {"position": step.position, "codes": len(step.codes)}
    return {**committed, **{name: getattr(step.step, name) for name in STEP_FIELDS}, "tree": tree}


def _frames(
    pipe: Pipeline, codes: list[int], steps: Sequence[dict[str, Any]], final: Image.Image
) -> dict[str, Any]:
    """Returns one sheet with the image after some of the steps, evenly spread and including the last."""
    ends = [step["position"] + step["codes"] for step in steps]
    stride = -(-len(ends) // MAX_FRAMES)
    counts = [1, *ends[::-stride][::-1]]  # counted back from the last step
    shrink = min(1.0, MAX_SIDE / max(final.size))
    width, height = round(final.width * shrink), round(final.height * shrink)
    sheet = Image.new("RGBA", (COLUMNS * width, -(-len(counts) // COLUMNS) * height))
    for index, count in enumerate(counts):
        frame = final.convert("RGBA") if count == len(codes) else pipe.partial_image(codes[:count])
        sheet.paste(frame.resize((width, height)), (index % COLUMNS * width, index // COLUMNS * height))
    stream = io.BytesIO()
    sheet.save(stream, format="WEBP", quality=90)
    data_uri = SHEET_START + base64.b64encode(stream.getvalue()).decode()
    return {"sheet": data_uri, "columns": COLUMNS, "size": [width, height], "counts": counts}


def write(path: Path, recording: Recording) -> None:
    """Writes a recording as JSON, atomically."""
    write_atomic(path, json.dumps(asdict(recording)).encode())


def read(path: Path) -> Recording:
    """Reads a recording of `generate_images --record`. Raises UserError if the file is not one."""
    remedy = "delete it and record again"
    content = read_json(path, remedy)
    with reading(path, remedy):
        recording = Recording(**content)
        # Never a remote address: the page must not fetch.
        if not recording.steps or not recording.frames["sheet"].startswith(SHEET_START):
            raise ValueError("not a recording")
    return recording


def races(folders: Sequence[Path]) -> list[list[Recording]]:
    """Returns one race per image that all folders recorded: one recording from each. Folders without any are
    passed over."""
    by_folder = [{path.name: path for path in folder.glob(f"{PREFIX}*.json")} for folder in folders]
    by_folder = [paths for paths in by_folder if paths]
    names = sorted(set.intersection(*map(set, by_folder))) if by_folder else []
    return [[read(paths[name]) for paths in by_folder] for name in names]
