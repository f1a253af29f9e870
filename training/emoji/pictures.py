"""Pictures without end: originals under jitter, each a function of (stream, number), none of them twice.

A stream is a name: "held_out" draws the (style, name) pairs kept out of training, every other ("train",
"validation", ...) trained pairs at placements of its own. P is the side of a picture, F = OVERSAMPLING.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from adt_tree.errors import UserError
from training.emoji.bpe import random_caption
from training.emoji.data import OVERSAMPLING, read_captions

SCALE = (0.75, 1.0)
DEGREES = 6.0
ONE_SIDED = frozenset("ambulance taxi bus 8 right left tilted".split())  # letters or a direction in them


@dataclass(frozen=True, slots=True)
class Jitter:
    """Placement of an original: scale, degrees of turn, share of the free margin to the right and below."""

    scale: float
    degrees: float
    right: float
    down: float
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """What a picture shows and how: row of captions.jsonl, prompt, placement."""

    row: dict
    text: str
    jitter: Jitter


def draw_jitter(name: str, rng: random.Random) -> Jitter:
    """Uniform over the ranges; half are mirrored where the name allows."""
    placement = rng.uniform(*SCALE), rng.uniform(-DEGREES, DEGREES), rng.random(), rng.random()
    return Jitter(*placement, rng.random() < 0.5 and not ONE_SIDED & set(name.split()))


def place(original: np.ndarray, jitter: Jitter) -> np.ndarray:
    """uint8 [F P, F P, 3] -> [P, P, 3]: the original placed on white, F x F pixels averaged."""
    side = len(original)
    image = Image.fromarray(original[:, ::-1] if jitter.mirrored else original)
    cosine = math.cos(math.radians(jitter.degrees)) / jitter.scale
    sine = math.sin(math.radians(jitter.degrees)) / jitter.scale
    middle, free = side / 2, (1 - jitter.scale) * side
    x, y = middle + (jitter.right - 0.5) * free, middle + (jitter.down - 0.5) * free
    inverse = (cosine, sine, middle - cosine * x - sine * y, -sine, cosine, middle + sine * x - cosine * y)
    placed = image.transform((side, side), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR,
                             fillcolor="white")  # fmt: skip
    return np.asarray(placed.reduce(OVERSAMPLING))


class Pictures:
    """All originals of a work folder and the streams drawn from them."""

    def __init__(self, work: Path) -> None:
        """UserError if the data stage has not been run there."""
        if not (work / "originals.npy").exists():
            raise UserError(f"{work} holds no originals.npy: run `train_emoji data --work_dir {work}`")
        self.originals = np.load(work / "originals.npy", mmap_mode="r")
        self.rows = read_captions(work)

    @property
    def size(self) -> int:
        """Side of a picture, pixels."""
        return self.originals.shape[1] // OVERSAMPLING

    def of_split(self, split: str) -> list[dict]:
        """Rows of captions.jsonl of one split."""
        return [row for row in self.rows if row["split"] == split]

    def plan(self, stream: str, numbers: Sequence[int]) -> list[Picture]:
        """What the pictures of these numbers are, not drawn yet."""
        rows, planned = self.of_split("held_out" if stream == "held_out" else "train"), []
        for number in numbers:
            rng = random.Random(f"{stream}/{number}")
            row = rng.choice(rows)
            planned.append(Picture(row, random_caption(row, rng), draw_jitter(row["name"], rng)))
        return planned

    def draw(self, planned: Sequence[Picture]) -> np.ndarray:
        """uint8 [N, P, P, 3] of planned pictures."""
        return np.stack([place(self.originals[item.row["index"]], item.jitter) for item in planned])
