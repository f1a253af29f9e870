"""Lumina-mGPT: the Chameleon layout with square images of several sizes, told by tokens, rows ended by one.

A sequence is: prompt, begin of image, height, width, then rows of codes, each followed by a row-separator
token. Height and width count pairs of cells. Facts: reference code of Alpha-VLLM/Lumina-mGPT and
jadohu/LANTERN. No torch until one is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from models.anole import shares_norms
from models.errors import CheckpointError
from models.spec import CKPTS, Checkpoint, ModelSpec, late

if TYPE_CHECKING:
    from models.model import Model

ROW_END = "<reserved08799>"
DEFAULT_SIZE = 768
SIZES = 8800  # <reserved0NNNN> of NNNN = SIZES + n: n pairs of cells
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
    if size < 1 or size % (2 * patch):
        raise ValueError(
            f"--target_size {size}: it must be a multiple of {2 * patch}, two cells of the VQGAN"
        )
    return Grid(size // patch, size // patch)


def load(checkpoint: Checkpoint) -> Model:
    """Lumina-mGPT drawing images of target_size (default DEFAULT_SIZE)."""
    from models.checkpoint.folder import read_fields
    from models.layouts.chameleon_files import prompt_encoder, read_chameleon

    opened = read_chameleon(checkpoint, shared_norms=True)
    size = checkpoint.options.target_size or DEFAULT_SIZE
    try:
        grid = grid_of(size, opened.codec.config.patch_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    side = f"<reserved{SIZES + grid.height // 2:05d}>"
    row_end, side_token = read_fields(
        checkpoint.folder, lambda: (token_of(opened.config, ROW_END), token_of(opened.config, side))
    )
    start = (opened.layout.begin_of_image, side_token, side_token)
    instruction = INSTRUCTION.format(size=size)
    prompts = prompt_encoder(opened.tokenizer, opened.layout, start, start, instruction)
    return opened.model(grid, prompts, row_end)


LUMINA_MGPT = ModelSpec(
    name="lumina_mgpt",
    about="Lumina-mGPT-7B",
    load=load,
    recognises=lambda fields, shapes: shares_norms(fields, shapes) is True,
    decoder_config=late("models.layouts.chameleon", "decoder_config"),
    home=CKPTS / "lumina_mgpt",
    target="Lumina-mGPT-7B-768",
    drafter="trained_drafters",
    options=("tokenizer_base_path",),
    default_size=DEFAULT_SIZE,
    tree=TreeShape(6, 10, 58),
    method="self-draft",  # no drafter network is published
    token_shift="auto",
    manifest="lumina_mgpt",
)
