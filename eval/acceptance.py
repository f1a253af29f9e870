"""Where images are easy: maps of a run's steps by cell, averaged over its images. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adt_tree.errors import UserError
from eval.runs.run_folder import read_steps

CODES, TOP = "codes per call", "top1"
COUNTS = (CODES, "depth", "width")


def maps(steps: Sequence[dict[str, Any]], height: int, width: int) -> dict[str, np.ndarray]:
    """Maps [height, width]: codes committed by the target call that made a cell, depth and width of its tree,
    and the target's largest probability there if the steps have it. NaN where no step made it.
    """
    kinds = (*COUNTS, TOP) if all(step.get(TOP) for step in steps) else COUNTS
    found = {kind: np.full((height, width), np.nan) for kind in kinds}
    for step in steps:
        count = step["accepted"] + 1
        for place in range(count):
            cell = divmod(step["position"] + place, width)
            for kind, value in zip(COUNTS, (count, step["depth"], step["width"]), strict=True):
                found[kind][cell] = value
            if TOP in found:
                found[TOP][cell] = step[TOP][place]
    return found


def average(folder: Path) -> dict[str, Any]:
    """A run's maps, averaged over its images, and how codes per call correlate with top-1 probability.

    UserError if its steps are missing, damaged or of several grids.
    """
    steps = {name: own for name, own in read_steps(folder).items() if own}
    if not steps:
        raise UserError(f"{folder}: it holds no records of images; run generate_images on it again")
    try:
        grids = {grid_of(own) for own in steps.values()}
        if len(grids) > 1:
            raise UserError(f"{folder}: images of several grids ({sorted(grids)}); give runs of one model")
        ((height, width),) = grids
        every = [maps(own, height, width) for own in steps.values()]
        calls = [step["accepted"] + 1 for own in steps.values() for step in own]
    except UserError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
        raise UserError(
            f"{folder}: the steps in its records are damaged: delete {folder / 'records'} and run "
            "generate_images on it again"
        ) from None
    kinds = [kind for kind in every[0] if all(kind in own for own in every)]
    stacks = {kind: np.ma.masked_invalid(np.stack([own[kind] for own in every])) for kind in kinds}
    found = {kind: stack.mean(axis=0).filled(np.nan) for kind, stack in stacks.items()}
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
        raise UserError(f"{codes} codes in rows of {width}: its steps are not those of one image")
    return codes // width, width


def correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Pearson's, over the cells that both have; None where one of them does not vary."""
    pairs = np.stack((one, other))[:, np.isfinite(one) & np.isfinite(other)]
    if not pairs.size or not np.ptp(pairs, axis=1).all():
        return None
    return float(np.corrcoef(pairs)[0, 1])
