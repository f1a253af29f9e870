"""Builds modules without memory, and gives them the tensors of a checkpoint.

accelerate's init_empty_weights would first make and initialise each parameter and then move it to the meta
device; here nothing is initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adt_tree.errors import CheckpointError, is_out_of_memory
from models.checkpoint.weights import Weights

RANDOM = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


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


def load_module(
    make: Callable[[], nn.Module],
    weights: Weights,
    source: Path,
    to_ours: Callable[[Weights], Mapping[str, Tensor]] = dict,
    remedy: str = "fetch it again, or the config.json that belongs to it",
) -> Any:
    """Returns the module that make() builds with `weights` as its parameters, in evaluation mode, on their
    device and in their dtype (Weights.placed).

    to_ours: the module's state dict from the published tensors. Raises CheckpointError, which names `source`,
    if names or shapes do not fit the module, or the weights do not fit the device.
    """
    module = on_meta(make)
    try:
        module.load_state_dict(to_ours(weights), assign=True)
        return module.requires_grad_(False).eval()
    except KeyError as error:
        faults = [f"tensor {name} is missing" for name in error.args]
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise CheckpointError(
                f"{source}: no room for the weights on {weights.device} as {weights.dtype}: choose a "
                "smaller precision or another device"
            ) from error
        faults = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    lines = [f"{source}: the weights do not fit their configuration: {fault}" for fault in faults]
    raise CheckpointError(f"{lines[0]}{more}: {remedy}", lines)
