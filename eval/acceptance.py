"""Maps of where images are easy to draft: for each cell, the codes per call, tree shape and top-1 probability
of the step that generated it, averaged over images.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from models.checkpoint.files import reading
from storage.run_folder import RECORDS, read_records, stored_grid

CODES, TOP1 = "codes per call", "top1"
COUNTS = (CODES, "depth", "width")


def maps(steps: Sequence[dict[str, Any]], grid: Grid) -> dict[str, np.ndarray]:
    """Returns maps [height, width] of one image by their name; NaN in cells that no step generated. Several
    rasters lie side by side, one empty column apart, from the first on the left. Row ends have no place.

    "codes per call", "depth", "width": how many cells the target call that generated the cell committed, and
    the shape of its draft tree. "top1", where all steps hold it: the target's largest probability there.
    """
    kinds = (*COUNTS, TOP1) if all(step.get(TOP1) for step in steps) else COUNTS
    height, width = max(r.height for r in grid.rasters), sum(r.width + 1 for r in grid.rasters) - 1
    by_kind = {kind: np.full((height, width), np.nan) for kind in kinds}
    left = np.cumsum([0, *(raster.width + 1 for raster in grid.before)])  # first column of every raster
    for step in steps:
        count = step["accepted"] + 1
        for index in range(count):
            row, column, raster = grid.cell(step["position"] + index)
            if column == grid.rasters[raster].width:
                continue
            cell = row, left[raster] + column
            for kind, value in zip(COUNTS, (count, step["depth"], step["width"]), strict=True):
                by_kind[kind][cell] = value
            if TOP1 in by_kind:
                by_kind[TOP1][cell] = step[TOP1][index]
    return by_kind


def average(folder: Path) -> dict[str, Any]:
    """Returns averages over the images of a run of generate_images.

    Keys: images, their number; codes_per_call; maps, by name; and correlation: over the cells, Pearson's
    correlation of the maps of codes per call and of top-1 probability, None if the steps hold no probability.
    A run that decoded several rows at once has no maps: the cells of its steps do not follow one another.

    Raises UserError if the run's steps or its grid are missing or damaged.
    """
    by_image = {record.name: record.steps for record in read_records(folder) if record.steps}
    if not by_image:
        raise UserError(f"{folder} holds no records of images; run generate_images on it again")
    grid = stored_grid(folder)
    with reading(folder / RECORDS, "delete it and run generate_images again"):
        follow = chain(*map(pairwise, by_image.values()))
        in_order = all(b["position"] == a["position"] + a["accepted"] + 1 for a, b in follow)
        image_maps = [maps(steps, grid) if in_order else {} for steps in by_image.values()]
        calls = [step["accepted"] + 1 for steps in by_image.values() for step in steps]
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


def correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Returns Pearson's correlation of two maps over the cells where both are finite; None if either is
    constant there."""
    pairs = np.stack((first, second))[:, np.isfinite(first) & np.isfinite(second)]
    if not pairs.size or not np.ptp(pairs, axis=1).all():
        return None
    return float(np.corrcoef(pairs)[0, 1])
