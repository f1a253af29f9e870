"""Where images are easy: maps of a run's steps by cell, averaged over its images. No torch.

Codes per target call, depth and width of its tree, and the target's largest probability at each committed
code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.errors import UserError
from eval.figures import CODES, TOP, maps
from eval.outputs import STEPS, read_statistics, read_steps

Map = list[list[float]]


def average(folder: Path) -> dict[str, Any]:
    """A run's maps, averaged over its images, and how codes per call correlate with top-1 probability.

    UserError if its steps are missing, damaged or of several grids.
    """
    steps = {name: own for name, own in read_steps(folder / STEPS, read_statistics(folder)).items() if own}
    if not steps:
        raise UserError(f"{folder}: its {STEPS} has no step of its images; run generate_images on it again")
    try:
        grids = {grid_of(own) for own in steps.values()}
        if len(grids) > 1:
            raise UserError(f"{folder}: images of several grids ({sorted(grids)}); give runs of one model")
        ((height, width),) = grids
        every = [maps(own, height, width) for own in steps.values()]
        calls = [step["accepted"] + 1 for own in steps.values() for step in own]
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        raise UserError(f"{folder / STEPS} is damaged: run generate_images on it again") from None
    found = {
        kind: _mean([own[kind] for own in every]) for kind in every[0] if all(kind in own for own in every)
    }
    return {
        "images": len(steps),
        "codes_per_call": sum(calls) / len(calls),
        "correlation": correlation(found[CODES], found[TOP]) if TOP in found else None,
        "maps": found,
    }


def grid_of(steps: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Rows and columns of an image, from its steps. UserError if they do not tell."""
    codes = max(step["position"] + step["accepted"] + 1 for step in steps)
    below = next((step for step in steps if step["row"] > 0), None)
    width = codes if below is None else (below["position"] - below["column"]) // below["row"]
    if width < 1 or codes % width:
        raise UserError(f"{STEPS}: {codes} codes in rows of {width}: its steps are not those of one image")
    return codes // width, width


def _mean(maps: Sequence[Map]) -> Map:
    """The mean of every cell over the maps that have it; NaN where none has."""
    rows = []
    for cells in zip(*maps, strict=True):
        columns = [[v for v in values if not math.isnan(v)] for values in zip(*cells, strict=True)]
        rows.append([sum(values) / len(values) if values else math.nan for values in columns])
    return rows


def correlation(one: Map, other: Map) -> float | None:
    """Pearson's, over the cells that both have; None where one of them does not vary."""
    cells = zip(sum(one, []), sum(other, []), strict=True)
    pairs = [pair for pair in cells if not any(map(math.isnan, pair))]
    if not pairs:
        return None
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    apart = [(a - means[0], b - means[1]) for a, b in pairs]
    spread = math.sqrt(sum(a * a for a, _ in apart) * sum(b * b for _, b in apart))
    return sum(a * b for a, b in apart) / spread if spread > 0 else None
