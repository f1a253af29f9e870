"""The sizes of a target's steps: exact ones, or the few for which CUDA graphs are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adt_tree.policy import SMALLEST, TreeShape

BUCKETS = (1, 8, 16, 32, 64)  # numbers of nodes that passes are recorded with; above, multiples of the last
# A pass is recorded for a bound on the committed codes: 256, 512, ... for images of up to 2048 codes. The
# bounds of larger images lie a greater multiple of CONTEXT apart, so that there are MAX_CONTEXTS at most.
CONTEXT, MAX_CONTEXTS = 256, 8


@dataclass(frozen=True, slots=True)
class Padding:
    """Raises the sizes of steps to a few, so that few CUDA graphs are recorded, or leaves them alone."""

    few: bool = False  # true: sizes are raised
    cells: int = 0  # of an image
    max_prompt: int = 0

    def tree(self, largest: TreeShape) -> TreeShape:
        """Returns the shape to which the trees of a step are padded at least. None exceeds `largest`."""
        return largest if self.few else SMALLEST

    def longest(self, committed: Sequence[int]) -> int:
        """Returns a bound on the cells in any slot's prefix, for a cache of one layer: it is small, so that
        reading all of it costs little."""
        return self.cells if self.few else max(committed)

    def nodes(self, nodes: int) -> int:
        """Returns the number of nodes of a pass over `nodes` nodes: the next of BUCKETS."""
        if not self.few:
            return nodes
        return next((rows for rows in BUCKETS if rows >= nodes), -(-nodes // BUCKETS[-1]) * BUCKETS[-1])

    def committed(self, committed: Sequence[int]) -> tuple[int, ...]:
        """Returns bounds on the cells in the prefixes: one for each slot, or one for all slots, a multiple of
        CONTEXT or the whole image."""
        if not self.few:
            return tuple(committed)
        step = max(1, -(-self.cells // (CONTEXT * MAX_CONTEXTS))) * CONTEXT
        return (min(-(-max(1, *committed) // step) * step, self.cells),)

    def prompts(self, prompts: Sequence[int]) -> Sequence[int]:
        """Returns bounds on the rows of the prompts, one for each slot."""
        return [self.max_prompt] * len(prompts) if self.few else prompts
