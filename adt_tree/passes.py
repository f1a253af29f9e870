"""How the tensor work of a cycle runs: as it is, or by something that has seen its shapes before.

Work is a function of what the host knows (`host`, hashable) and of `inputs`: tensors, or dataclasses and
tuples of tensors and of more that the host knows. So is its result, which is the caller's. What it reads
besides stays where it is and is changed in place; nothing it does may be seen by the host but its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Host = tuple[Any, ...]  # hashable


class Passes(Protocol):
    """Who runs the work, and the sizes it wants it to have."""

    def nodes(self, count: int) -> int:
        """Rows of a target pass over `count` nodes: as many or more."""

    def reach(self, reach: int) -> int:
        """A bound on what is committed: `reach` or more, and no more than the image has."""

    def __call__(self, function: Callable[..., Any], host: Host, *inputs: Any) -> Any:
        """function(*host, *inputs), which beside its result writes scratch alone: running it twice is running
        it once."""

    def change(self, function: Callable[..., Any], host: Host, *inputs: Any) -> Any:
        """function(*host, *inputs), run exactly once: it moves on what is kept from cycle to cycle."""


class Direct:
    """See Passes: runs the work as it is, in the sizes it has."""

    def nodes(self, count: int) -> int:
        """See Passes."""
        return count

    def reach(self, reach: int) -> int:
        """See Passes."""
        return reach

    def __call__(self, function: Callable[..., Any], host: Host, *inputs: Any) -> Any:
        """See Passes."""
        return function(*host, *inputs)

    change = __call__


DIRECT = Direct()
