"""Modules without memory: shapes alone, until weights take the place of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

RANDOM = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoInit(TorchFunctionMode):
    """Leaves out random initial values: nothing holds them, and on the meta device each first use imports
    hundreds of modules, which costs seconds and 70 MB."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return given["tensor"] if func in RANDOM else func(*args, **given)


def skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """What make() builds, its parameters on the meta device."""
    with torch.device("meta"), _NoInit():
        return make()
