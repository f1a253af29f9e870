"""Builds modules without memory, checks a checkpoint's headers against them, and gives them its tensors.

The shapes that a checkpoint must have are those of our module under the published names, so no second list of
them exists. accelerate's init_empty_weights would first make and initialise each parameter and then move it
to the meta device; here nothing is initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adt_tree.errors import CheckpointError, is_out_of_memory
from models.checkpoint.weights import Weights

RANDOM = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
REMEDY = "fetch it again, or the config.json that belongs to it"
PER_HEAD = (".q_norm.", ".k_norm.")  # norms that a file may store once for several heads


class _SkipInit(TorchFunctionMode):
    """Skips random initial values.

    On the meta device they have no effect, but the first use of each function imports hundreds of modules,
    which costs seconds and 70 MB.
    """

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = kwargs or {}
        return arguments["tensor"] if func in RANDOM else func(*args, **arguments)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns the module that make() builds, with its parameters on the meta device."""
    with torch.device("meta"), _SkipInit():
        return make()


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module of ours, and the names and forms of its tensors in a published checkpoint."""

    make: Callable[[], nn.Module]
    to_published: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict  # of our state dict
    to_ours: Callable[[Weights], Mapping[str, Tensor]] = dict  # the inverse

    @classmethod
    def renamed(cls, make: Callable[[], nn.Module], names: Mapping[str, str]) -> StoredModule:
        """Returns a module whose tensors only have other names. names: ours -> published."""
        return cls(
            make,
            lambda state: {published: state[ours] for ours, published in names.items()},
            lambda weights: weights.renamed(names),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes, by published name, that the tensors of a checkpoint must have."""
        state = on_meta(self.make).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in self.to_published(state).items()}

    def load(self, weights: Weights, source: Path) -> Any:
        """Returns the module with `weights` as its parameters, in evaluation mode.

        The module gets the device and dtype of the weights (Weights.placed). A caller whose checkpoint may be
        incomplete calls require() before. Raises CheckpointError, which names `source`, if they do not fit
        the module or the device.
        """
        module = on_meta(self.make)
        try:
            module.load_state_dict(self.to_ours(weights), assign=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise CheckpointError(
                    f"{source}: no room for the weights on {weights.device} as {weights.dtype}: choose a "
                    "smaller precision or another device"
                ) from error
            lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            raise CheckpointError(f"{source}: the weights do not fit config.json: {lines[0]}") from error
        return module.requires_grad_(False).eval()


def mismatches(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns a line for each tensor of `shapes` that is missing or has another shape.

    Other tensors in the file do not matter.
    """
    lines, stored = [], weights.shapes
    for name, shape in shapes.items():
        if name not in stored:
            lines.append(f"tensor {name} {list(shape)} is missing")
        elif not _fits(name, stored[name], shape):
            file = weights.file_of(name).name
            lines.append(
                f"tensor {name} in {file} is {list(stored[name])}, config.json asks for {list(shape)}"
            )
    return lines


def require(
    folder: Path, weights: Weights, shapes: Mapping[str, tuple[int, ...]], remedy: str = REMEDY
) -> None:
    """Raises CheckpointError with the first mismatch, the number of others and what to do."""
    if lines := mismatches(weights, shapes):
        more = f" (and {len(lines) - 1} more of {len(shapes)} tensors)" if len(lines) > 1 else ""
        raise CheckpointError(
            f"{folder}: {lines[0]}{more}: {remedy}", [f"{folder}: {line}" for line in lines]
        )


def _fits(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if stored == shape:
        return True
    per_head = any(part in name for part in PER_HEAD) and stored[1:] == shape[1:]
    return per_head and stored[0] > 0 and shape[0] % stored[0] == 0
