"""Endless streams of pictures: originals under random jitter, none of them twice.

A picture is a function of its stream's name and its number. The stream "held_out" shows the (style, name)
pairs left out of training. Every other stream ("train", "validation", ...) shows trained pairs, each stream
at other placements. Dimensions: N pictures, P pixels a side, F = OVERSAMPLING.
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
from recipes.emoji.bpe import random_caption
from recipes.emoji.data import OVERSAMPLING, read_captions

SCALE = (0.75, 1.0)
DEGREES = 6.0
ONE_SIDED = frozenset("ambulance taxi bus 8 right left tilted".split())  # never mirrored: letters, directions


@dataclass(frozen=True, slots=True)
class Jitter:
    """The placement of an original."""

    scale: float
    degrees: float
    right: float  # share of the free margin that lies to the left
    down: float  # share of the free margin that lies above
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is planned but not rendered."""

    row: dict  # of captions.jsonl
    text: str  # the prompt
    jitter: Jitter


def sample_jitter(name: str, rng: random.Random) -> Jitter:
    """Returns a placement, uniform over the ranges; half are mirrored where the name allows."""
    placement = rng.uniform(*SCALE), rng.uniform(-DEGREES, DEGREES), rng.random(), rng.random()
    return Jitter(*placement, rng.random() < 0.5 and not ONE_SIDED & set(name.split()))


def place(original: np.ndarray, jitter: Jitter) -> np.ndarray:
    """Returns the picture [P, P, 3] of an original [F P, F P, 3] on white, both uint8.

    The original is placed at F times the resolution, then blocks of F x F pixels are averaged.
    """
    side = len(original)
    image = Image.fromarray(original[:, ::-1] if jitter.mirrored else original)
    cosine = math.cos(math.radians(jitter.degrees)) / jitter.scale
    sine = math.sin(math.radians(jitter.degrees)) / jitter.scale
    middle, free = side / 2, (1 - jitter.scale) * side
    x, y = middle + (jitter.right - 0.5) * free, middle + (jitter.down - 0.5) * free
    # Pillow takes the map from coordinates of the result to coordinates of the original.
    inverse = (cosine, sine, middle - cosine * x - sine * y, -sine, cosine, middle + sine * x - cosine * y)
    placed = image.transform((side, side), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR,
                             fillcolor="white")  # fmt: skip
    return np.asarray(placed.reduce(OVERSAMPLING))


class Pictures:
    """The originals of a work folder, and streams of pictures made from them."""

    def __init__(self, work: Path) -> None:
        """Raises UserError if the data stage has not been run there."""
        if not (work / "originals.npy").exists():
            raise UserError(f"{work} holds no originals.npy: run recipes.emoji.data with this --work_dir")
        self.originals = np.load(work / "originals.npy", mmap_mode="r")
        self.rows = read_captions(work)

    @property
    def size(self) -> int:
        """The side of a picture in pixels."""
        return self.originals.shape[1] // OVERSAMPLING

    def of_split(self, split: str) -> list[dict]:
        """Returns the rows of captions.jsonl of one split, "train" or "held_out"."""
        return [row for row in self.rows if row["split"] == split]

    def plan(self, stream: str, numbers: Sequence[int]) -> list[Picture]:
        """Returns the pictures of a stream with these numbers, not yet rendered."""
        rows, planned = self.of_split("held_out" if stream == "held_out" else "train"), []
        for number in numbers:
            rng = random.Random(f"{stream}/{number}")
            row = rng.choice(rows)
            planned.append(Picture(row, random_caption(row, rng), sample_jitter(row["name"], rng)))
        return planned

    def render(self, planned: Sequence[Picture]) -> np.ndarray:
        """Returns planned pictures as uint8 [N, P, P, 3]."""
        return np.stack([place(self.originals[item.row["index"]], item.jitter) for item in planned])
