"""Modules made without memory, their state dict checked by headers alone, then filled with the weights.

What a family expects are the shapes of our own module under the published names, by the inverse of the key
map that loads them; so there is no second list to keep. accelerate's init_empty_weights would make each
parameter first, move it to the meta device after and draw its initial values there; here nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adt_tree.errors import CheckpointError
from models.checkpoint.weights import Weights

RANDOM = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
PER_HEAD = (".q_norm.", ".k_norm.")  # may be stored once for several heads


class _NoInit(TorchFunctionMode):
    """Leaves out random initial values: nothing holds them, and on the meta device each first use imports
    hundreds of modules, which costs seconds and 70 MB."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return given["tensor"] if func in RANDOM else func(*args, **given)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """What make() builds, its parameters on the meta device."""
    with torch.device("meta"), _NoInit():
        return make()


def expected(
    make: Callable[[], nn.Module], to_published: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of a module that make() builds."""
    state = on_meta(make).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in to_published(state).items()}


def mismatches(weights: Weights, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A line for each wanted tensor that is missing or has another shape; others do not matter."""
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


def require(folder: Path, weights: Weights, wanted: Mapping[str, tuple[int, ...]], hint: str) -> None:
    """CheckpointError with the first mismatch, how many there are, and what to do (hint)."""
    if found := mismatches(weights, wanted):
        more = f" (and {len(found) - 1} more of {len(wanted)} tensors)" if len(found) > 1 else ""
        raise CheckpointError(f"{folder}: {found[0]}{more}: {hint}", [f"{folder}: {line}" for line in found])


def _fits(name: str, have: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if have == wanted:
        return True
    shared = any(part in name for part in PER_HEAD) and have[1:] == wanted[1:]
    return shared and have[0] > 0 and wanted[0] % have[0] == 0


def build(
    make: Callable[[], nn.Module],
    weights: Weights,
    source: Path,
    to_ours: Callable[[Weights], Mapping[str, Tensor]] = dict,
) -> Any:
    """Make a module without memory and hand it the weights, which take the place of its parameters.

    weights: read to the device and in the type that the module shall have (Weights.placed). to_ours: makes a
    state dict of them, whose names require() has found; by default they go by our names. CheckpointError if
    they do not fit or do not go in.
    """
    module = on_meta(make)
    try:
        module.load_state_dict(to_ours(weights), assign=True)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise CheckpointError(
                f"{source}: no room for the weights on {weights.device} as {weights.dtype}: choose a smaller "
                "--precision or another --device"
            ) from None
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(f"{source}: the weights do not fit config.json: {lines[0]}") from None
    return module.requires_grad_(False).eval()
