"""Reads published tables of nearest codes. Row i of top_{V - 1}_indices.npy lists all codes except i, in
ascending order of their L2 distance from code i in the codebook.

Dimensions: V codes, C size of a code vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.files import reading

REMEDY = "give the table of this model's codebook, or leave it out: it is then computed"
PROBES = 64  # rows that are compared with the distances in the codebook
TOLERANCE = 1e-3  # relative: tables are computed in fp32, whose rounding swaps codes at nearly equal distance


def find_table(places: Sequence[Path], codes: int) -> Path | None:
    """Returns the first file in `places`, which are folders or files, that has the name of a table for
    `codes` codes, or is itself an .npy file. None if there is none."""
    paths = (place if place.is_file() else place / f"top_{codes - 1}_indices.npy" for place in places)
    return next((path for path in paths if path.is_file() and path.suffix == ".npy"), None)


def open_table(path: Path, codes: int) -> Any:
    """Returns the file's array, mapped into memory. CheckpointError if the file is damaged, holds no table of
    codes, or has another number of rows than `codes`."""
    import numpy as np

    with reading(path, REMEDY):
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
        if stored.ndim != 2 or stored.dtype.kind not in "ui":
            raise ValueError(f"holds {stored.dtype} {list(stored.shape)}, not a table of codes")
        if len(stored) != codes:
            raise ValueError(f"has {len(stored)} rows, the codebook has {codes} codes")
    return stored


def read_table(path: Path, codebook: Tensor, width: int) -> Tensor:
    """Returns the `width` nearest other codes of every code, [V, width] int64, on the codebook's device.

    The file is mapped into memory, so only these columns of its half gigabyte are read. codebook [V, C]: the
    code vectors. CheckpointError if the file is damaged, has fewer columns, or belongs to another codebook,
    which the distances along PROBES rows reveal.
    """
    import numpy as np

    codes = len(codebook)
    stored = open_table(path, codes)
    with reading(path, REMEDY):
        if stored.shape[1] < width:
            raise ValueError(f"has {stored.shape[1]} columns, {width} are needed (a smaller lantern_k)")
        table = torch.from_numpy(np.ascontiguousarray(stored[:, :width]).astype(np.int64)).to(codebook.device)
        if not _lists_nearest(table, codebook.double()):
            raise ValueError("does not list the nearest codes of this codebook, nearest first")
    return table


def _lists_nearest(table: Tensor, points: Tensor) -> bool:
    """Returns whether PROBES rows, spread over the table, list codes at the distances of the nearest ones."""
    codes, width = table.shape
    rows = torch.linspace(0, codes - 1, min(codes, PROBES), dtype=torch.float32, device=table.device).long()
    distance = torch.cdist(points[rows], points, compute_mode="donot_use_mm_for_euclid_dist")
    listed = distance.gather(1, table[rows])  # [PROBES, width]
    distance[torch.arange(len(rows), device=rows.device), rows] = float("inf")
    nearest = distance.topk(max(width, 1), dim=1, largest=False).values
    return bool(((listed - nearest[:, :width]).abs() <= TOLERANCE * nearest.amax() + 1e-12).all())
