"""Published tables of nearest codes: top_{V - 1}_indices.npy, in row i all other codes by ascending raw L2
distance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adt_tree.errors import CheckpointError, reason

PROBES = 64  # rows that are held against the codebook
SLACK = 1e-3  # relative; tables are made in fp32, whose rounding swaps near-ties


def find_table(places: Sequence[Path], codes: int) -> Path | None:
    """The first table for a codebook of that size in the places, each a folder or a file; None if none is."""
    paths = (place if place.is_file() else place / f"top_{codes - 1}_indices.npy" for place in places)
    return next((path for path in paths if path.is_file() and path.suffix == ".npy"), None)


def other_codebook(codes: int) -> str:
    """What a table that does not fit is, and what to do."""
    return f"the table of another codebook: make or fetch that of this model's {codes} codes, or leave it out"


def check_table(path: Path, codes: int) -> Any:
    """The file's array, mapped. CheckpointError if truncated, no table, or of other rows than codes."""
    import numpy as np

    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({reason(error)}): truncated or damaged") from None
    if stored.ndim != 2 or stored.dtype.kind not in "ui":
        raise CheckpointError(
            f"{path} holds {stored.dtype} {list(stored.shape)}, not a table of code numbers"
        )
    if len(stored) != codes:
        raise CheckpointError(f"{path} has {len(stored)} rows: {other_codebook(codes)}")
    return stored


def read_table(path: Path, codebook: Tensor, width: int) -> Tensor:
    """The first `width` columns [V, width] int64 of a table of uint16 [V, at least width], self excluded.

    The file is mapped: of half a gigabyte only these columns are read. codebook [V, C]: raw latents.
    CheckpointError if the file is damaged, too narrow or of another codebook; if that is as large, the
    distances along some rows tell.
    """
    import numpy as np

    codes = len(codebook)
    stored, other = check_table(path, codes), other_codebook(codes)
    if stored.shape[1] < width:
        raise CheckpointError(
            f"{path} has {stored.shape[1]} columns, {width} are needed: choose a smaller --lantern_k"
        )
    table = torch.from_numpy(np.ascontiguousarray(stored[:, :width]).astype(np.int64)).to(codebook.device)
    own = torch.arange(codes, device=codebook.device)[:, None]
    if width and (int(table.max()) >= codes or int(table.min()) < 0 or bool((table == own).any())):
        raise CheckpointError(
            f"{path} names codes outside 0 to {codes - 1}, or a code as its own neighbour: {other}"
        )
    if not _ascends(table, codebook.double()):
        raise CheckpointError(f"{path}: its rows do not ascend in this codebook's distances: it is {other}")
    return table


def _ascends(table: Tensor, points: Tensor) -> bool:
    """Whether some rows begin at the nearest code and never come nearer."""
    codes, width = table.shape
    if width == 0:
        return True
    rows = torch.linspace(0, codes - 1, min(codes, PROBES), device=table.device).long()
    distance = torch.cdist(points[rows], points, compute_mode="donot_use_mm_for_euclid_dist")
    listed = distance.gather(1, table[rows])
    distance[torch.arange(len(rows), device=rows.device), rows] = float("inf")
    nearest = distance.amin(dim=1, keepdim=True)
    steps = torch.cat((nearest, listed), dim=1)
    loose = SLACK * steps.amax() + 1e-12
    return bool((steps.diff(dim=1) >= -loose).all() and (listed[:, :1] - nearest <= loose).all())
