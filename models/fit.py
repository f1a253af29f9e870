"""Whether a checkpoint holds what its configuration asks for, by headers alone: nothing is loaded.

A family's expected tensors are the shapes of our own module under the published names, by the inverse of the
key map that loads them; so there is no second list to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from models.errors import CheckpointError
from models.skeleton import skeleton
from models.weights import Weights

Shapes = Mapping[str, tuple[int, ...]]
PER_HEAD = (".q_norm.", ".k_norm.")  # may be stored once for several heads


def expected(
    make: Callable[[], nn.Module], to_published: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of a module that make() builds, without memory."""
    state = skeleton(make).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in to_published(state).items()}


def misfits(weights: Weights, wanted: Shapes) -> list[str]:
    """A line for each tensor that is missing or has another shape; tensors beyond those wanted are none of
    its business."""
    shapes, found = weights.shapes, []
    for name, shape in wanted.items():
        if name not in shapes:
            found.append(f"tensor {name} {list(shape)} is missing")
        elif not _fits(name, shapes[name], shape):
            file = weights.file_of(name).name
            found.append(
                f"tensor {name} in {file} is {list(shapes[name])}, config.json asks for {list(shape)}"
            )
    return found


def require(folder: Path, weights: Weights, wanted: Shapes, hint: str) -> None:
    """CheckpointError with the first misfit, how many there are, and what to do (hint)."""
    if found := misfits(weights, wanted):
        more = f" (and {len(found) - 1} more of {len(wanted)} tensors)" if len(found) > 1 else ""
        raise CheckpointError(f"{folder}: {found[0]}{more}: {hint}", [f"{folder}: {line}" for line in found])


def _fits(name: str, have: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if have == wanted:
        return True
    shared = any(part in name for part in PER_HEAD) and have[1:] == wanted[1:]
    return shared and have[0] > 0 and wanted[0] % have[0] == 0
