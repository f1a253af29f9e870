"""Lumina-mGPT: the Chameleon layout with square images of several sizes, told by tokens, rows ended by one.

A sequence is: prompt, begin of image, height, width, then rows of codes, each followed by a row end. Height
and width count pairs of cells. Facts: reference code of Alpha-VLLM/Lumina-mGPT and jadohu/LANTERN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adt_tree.grid import Grid
from models.anole import Prompts, open_chameleon
from models.checkpoint import read_fields
from models.errors import CheckpointError
from models.model import Model, Source

ROW_END = "<reserved08799>"
SIZES = 8800  # <reserved0NNNN> of NNNN = SIZES + n: n pairs of cells
DEFAULT_SIZE = 768
INSTRUCTION = "Generate an image of {size}x{size} according to the following prompt:\n"


def token_of(config: Mapping[str, Any], name: str) -> int:
    """A token's id. ValueError if the vocabulary has no such token."""
    vocabulary = config["vocabulary_map"]
    if name not in vocabulary:
        raise ValueError(f"vocabulary_map: token {name} is missing: this is no checkpoint of Lumina-mGPT")
    return vocabulary[name]


def grid_of(size: int, patch: int) -> Grid:
    """The raster of a square image of `size` pixels in cells of `patch`. ValueError if it is not whole pairs
    of cells."""
    if size % (2 * patch):
        raise ValueError(
            f"--target_size {size}: it must be a multiple of {2 * patch}, two cells of the VQGAN"
        )
    return Grid(size // patch, size // patch)


def load(source: Source) -> Model:
    """Lumina-mGPT drawing images of --target_size (default DEFAULT_SIZE)."""
    opened = open_chameleon(source, shared_norms=True)
    size = source.target_size or DEFAULT_SIZE
    try:
        grid = grid_of(size, opened.codec.config.patch_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    side = f"<reserved{SIZES + grid.height // 2:05d}>"
    row_end, side_token = read_fields(
        source.folder, lambda: (token_of(opened.config, ROW_END), token_of(opened.config, side))
    )
    opening = (opened.layout.begin_of_image, side_token, side_token)
    prompts = Prompts(opened.tokenizer, opened.layout, opening, opening, INSTRUCTION.format(size=size))
    return opened.model(grid, prompts, row_end)
