"""How the tensor work of a cycle runs: as it is, or by something that has seen its shapes before.

A pass is a function of numbers the host knows and of tensors. Beside its result it writes scratch alone, so
that running it twice is running it once; what it reads besides stays where it is and is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import Tensor


class Passes(Protocol):
    """Who runs passes, and the sizes it wants them to have."""

    def nodes(self, count: int) -> int:
        """Rows of a target pass over `count` nodes: as many or more."""

    def reach(self, reach: int) -> int:
        """A bound on what is committed: `reach` or more, and no more than the image has."""

    def __call__(self, function: Callable[..., Any], host: tuple[Hashable, ...], *tensors: Tensor) -> Any:
        """function(*host, *tensors): a tensor, or a dataclass with tensors. The result is the caller's."""


class Direct:
    """See Passes: runs them as they are, in the sizes they have."""

    def nodes(self, count: int) -> int:
        """See Passes."""
        return count

    def reach(self, reach: int) -> int:
        """See Passes."""
        return reach

    def __call__(self, function: Callable[..., Any], host: tuple[Hashable, ...], *tensors: Tensor) -> Any:
        """See Passes."""
        return function(*host, *tensors)


DIRECT = Direct()
