"""The token ids of an image in a sequence: its codes, the ends of its rows, and the tokens after it.

Families whose images transformers' `generate` can make describe their sequences by ImageTokens. Prompts and
images are then token ids, and no tokenizer is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from adt_tree.grid import Grid

# Token ids of prompts without padding, and the argument image_grid_thw of `generate` -> the grid that all of
# the prompts ask for. UserError if a prompt asks for none, or two prompts for different ones.
ReadGrid = Callable[[Sequence[list[int]], Tensor | None], Grid]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The token ids of one family's images. The image follows its prompt row by row, and tokens that end it
    follow the image."""

    codes: range  # token ids of the codes
    read_grid: ReadGrid
    row_end: int | None = None  # token id after every row of codes
    closing: tuple[int, ...] = ()  # token ids that always follow the image
    open_end: bool = False  # true if the model chooses the token after the image

    def sequence(self, codes: Sequence[int], grid: Grid) -> list[int]:
        """Returns the token ids of an image: those of its codes and of the ends of rows."""
        ids = [self.codes[code] for code in codes]
        if self.row_end is None:
            return ids
        rows = (ids[start : start + grid.width] for start in range(0, len(ids), grid.width))
        return [token for row in rows for token in (*row, self.row_end)]

    def length(self, grid: Grid) -> int:
        """Returns the number of token ids of an image, without those after it."""
        return grid.size + (0 if self.row_end is None else grid.height)
