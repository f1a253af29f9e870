"""The sizes of a target's steps (adt_tree.roles.Padding): exact ones, or the few for which CUDA graphs are
recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adt_tree.policy import SMALLEST, TreeShape

BUCKETS = (1, 8, 16, 32, 64)  # numbers of nodes that passes are recorded with; above, multiples of the last
# A pass is recorded for a bound on the committed codes: 256, 512, ... for images of up to 2048 codes. The
# bounds of larger images lie a greater multiple of CONTEXT apart, so that there are MAX_CONTEXTS at most.
CONTEXT, MAX_CONTEXTS = 256, 8


class NoPadding:
    """Leaves all sizes as they are."""

    few: ClassVar[bool] = False

    def tree(self, largest: TreeShape) -> TreeShape:
        return SMALLEST

    def longest(self, committed: Sequence[int]) -> int:
        return max(committed)

    def nodes(self, nodes: int) -> int:
        """Returns the number of nodes of a pass over `nodes` nodes."""
        return nodes

    def committed(self, committed: Sequence[int]) -> tuple[int, ...]:
        """Returns bounds on the cells in the prefixes: one for each slot, or one for all slots."""
        return tuple(committed)

    def prompts(self, prompts: Sequence[int]) -> Sequence[int]:
        """Returns bounds on the rows of the prompts, one for each slot."""
        return prompts


@dataclass(frozen=True, slots=True)
class Buckets:
    """Raises sizes to a few: trees to the policy's largest, nodes and cells to the next bucket, prompts to
    the longest that the target has room for."""

    few: ClassVar[bool] = True
    cells: int  # of an image
    max_prompt: int

    def tree(self, largest: TreeShape) -> TreeShape:
        return largest

    def longest(self, committed: Sequence[int]) -> int:
        return self.cells  # the cache of one layer is small, so that reading all of it costs little

    def nodes(self, nodes: int) -> int:
        return row_bucket(nodes)

    def committed(self, committed: Sequence[int]) -> tuple[int, ...]:
        return (context_bucket(max(1, *committed), self.cells),)

    def prompts(self, prompts: Sequence[int]) -> Sequence[int]:
        return [self.max_prompt] * len(prompts)


def row_bucket(count: int) -> int:
    """Returns the number of nodes with which a pass over `count` nodes is recorded."""
    return next((rows for rows in BUCKETS if rows >= count), -(-count // BUCKETS[-1]) * BUCKETS[-1])


def context_bucket(committed: int, size: int) -> int:
    """Returns the bound on committed codes with which a pass is recorded: a multiple of CONTEXT, or the whole
    image of `size` codes."""
    step = max(1, -(-size // (CONTEXT * MAX_CONTEXTS))) * CONTEXT
    return min(-(-committed // step) * step, size)
