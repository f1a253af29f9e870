"""Maps of where images are easy to draft: for each cell, the codes per call, tree shape and top-1 probability
of the step that generated it, averaged over images.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adt_tree.errors import UserError
from eval.runs.run_folder import read_steps

CODES, TOP1 = "codes per call", "top1"
COUNTS = (CODES, "depth", "width")


def maps(steps: Sequence[dict[str, Any]], height: int, width: int) -> dict[str, np.ndarray]:
    """Returns maps [height, width] of one image by their name; NaN in cells that no step generated.

    "codes per call", "depth", "width": how many codes the target call that generated the cell committed, and
    the shape of its draft tree. "top1", where all steps hold it: the target's largest probability there.
    """
    kinds = (*COUNTS, TOP1) if all(step.get(TOP1) for step in steps) else COUNTS
    by_kind = {kind: np.full((height, width), np.nan) for kind in kinds}
    for step in steps:
        count = step["accepted"] + 1
        for index in range(count):
            cell = divmod(step["position"] + index, width)
            for kind, value in zip(COUNTS, (count, step["depth"], step["width"]), strict=True):
                by_kind[kind][cell] = value
            if TOP1 in by_kind:
                by_kind[TOP1][cell] = step[TOP1][index]
    return by_kind


def average(folder: Path) -> dict[str, Any]:
    """Returns averages over the images of a run of generate_images.

    Keys: images (their number), codes_per_call, maps, and correlation, that of codes per call with the top-1
    probability over the cells, or None if the steps do not hold the probability.

    Raises UserError if the run's steps are missing, damaged, or of images of several sizes.
    """
    by_image = {name: steps for name, steps in read_steps(folder).items() if steps}
    if not by_image:
        raise UserError(f"{folder} holds no records of images; run generate_images on it again")
    try:
        grids = {grid_of(steps) for steps in by_image.values()}
        if len(grids) > 1:
            raise UserError(f"{folder}: images of several grids ({sorted(grids)}); give runs of one model")
        ((height, width),) = grids
        image_maps = [maps(steps, height, width) for steps in by_image.values()]
        calls = [step["accepted"] + 1 for steps in by_image.values() for step in steps]
    except UserError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
        raise UserError(
            f"{folder}: the steps in its records are damaged: delete {folder / 'records'} and run "
            "generate_images on it again"
        ) from None
    means = {}
    for kind in image_maps[0]:
        if all(kind in by_kind for by_kind in image_maps):
            stack = np.ma.masked_invalid(np.stack([by_kind[kind] for by_kind in image_maps]))
            means[kind] = stack.mean(axis=0).filled(np.nan)
    return {
        "images": len(by_image),
        "codes_per_call": sum(calls) / len(calls),
        "correlation": correlation(means[CODES], means[TOP1]) if TOP1 in means else None,
        "maps": means,
    }


def grid_of(steps: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Returns the rows and columns of an image, derived from its steps. Raises UserError if they disagree."""
    codes = max(step["position"] + step["accepted"] + 1 for step in steps)
    # position = row * width + column, so any step below the first row gives the width. Without one, the image
    # has a single row.
    below = next((step for step in steps if step["row"] > 0), None)
    width = codes if below is None else (below["position"] - below["column"]) // below["row"]
    if width < 1 or codes % width:
        raise UserError(f"{codes} codes in rows of {width}: these steps are not those of one image")
    return codes // width, width


def correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Returns Pearson's correlation of two maps over the cells where both are finite; None if either is
    constant there."""
    pairs = np.stack((first, second))[:, np.isfinite(first) & np.isfinite(second)]
    if not pairs.size or not np.ptp(pairs, axis=1).all():
        return None
    return float(np.corrcoef(pairs)[0, 1])
