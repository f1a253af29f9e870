"""A model with random weights that has the dimensions, and therefore the speed, of a published one.

It reads no files. The text of a prompt is the number of its tokens, such as "64". Its pixels are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import nn

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from models import footprint
from models.cell_tokens import CellIds
from models.checkpoint.stored_module import on_meta
from models.codecs.codec import Codec, CodeVectors
from models.codecs.vq import VQModel
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.footprint import Dimensions
from models.layouts.chameleon import CHAMELEON
from models.layouts.llamagen_prompts import PaddedPrompt
from models.model import DTYPES, Model
from models.registry import spec_of
from models.target import EncodedPrompt, Prompt, PromptEncoder

Net = TypeVar("Net", bound=nn.Module)
SCALE = 0.02  # standard deviation of weights
FIRST_CODE = 4  # token id of code 0 in the Chameleon layout


def random_prompts(cells: CellIds, row: torch.Tensor | None) -> PromptEncoder:
    """Returns an encoder of a text to int(text) tokens, the same in both guidance branches.

    row [1, D]: if not None, a prompt is this many copies of the row, for families that take embedded prompts.
    """

    def encode(text: str) -> EncodedPrompt:
        count = int(text)
        if row is not None:
            rows = row.expand(count, -1)
            return PaddedPrompt(rows, rows)
        tokens = [n % cells.codes.start for n in range(count)]
        return Prompt(tokens, tokens)

    return PromptEncoder(encode, cells)


def middle_rows(dims: Dimensions, codes: int) -> tuple[Grid, int]:
    """Returns a grid of about `codes` codes, the rows in the middle of an image, and the number of tokens in
    front of it: the prompt, and the rows above with their row ends. With a prompt of that length the
    caches are as full as in the middle of an image."""
    side = dims.columns
    height = min(side, max(2, codes // side))
    return Grid(height, side), dims.prompt + dims.tokens * (side - height) // (2 * side)


def middle_of_image(
    name: str, precision: str, device: str, layers: int | None, codes: int
) -> tuple[Model, int]:
    """Returns a model of the family `name` that makes about `codes` codes, some rows in the middle of an
    image, and the number of tokens in front of them (see middle_rows).

    layers: of the decoder; None: as many as published. Raises UserError for more than these.
    """
    dims = footprint.published_dimensions(name)
    published = dims.decoder.num_layers
    if layers is not None and layers > published:
        raise UserError(f"layers {layers}: {name} has {published}")
    dims = replace(dims, decoder=replace(dims.decoder, num_layers=layers or published))
    grid, before = middle_rows(dims, codes)
    return random_model(name, dims, grid, DTYPES[precision], torch.device(device)), before


def random_model(name: str, dims: Dimensions, grid: Grid, dtype: torch.dtype, device: torch.device) -> Model:
    """Returns a model of the family `name` whose decoder and drafter have the dimensions of `dims`.

    grid: rows and columns of its images. Its rows have row ends if `dims` has more tokens than codes.
    """
    drafter_config = dims.drafter
    decoder = _filled(lambda: Decoder(dims.decoder), dtype, device)
    drafter = None if drafter_config is None else _filled(lambda: DrafterNet(drafter_config), dtype, device)
    spec, codes = spec_of(name), dims.codes
    first = 0 if spec.embedded_prompts else FIRST_CODE
    decoder.cut_head(first, codes)
    row = decoder.embed.weight[:1] if spec.embedded_prompts else None
    vq, row_end = dims.vq, None
    if vq is None:
        assert dims.codec_parameters is not None, "a family without a VQModel has code vectors"
        size = dims.codec_parameters // codes
        vectors = _filled(lambda: nn.Embedding(codes, size), torch.float32, device).weight
        codec: Codec = CodeVectors(vectors, "random weights make no pixels")
    else:
        codec = _filled(lambda: VQModel(vq), torch.float32, device)
        if dims.tokens != (dims.side // vq.patch_size) ** 2:
            row_end, grid = first + codes, replace(grid, row_ends=True)
    return Model(
        spec=spec,
        grid=grid,
        prompts=random_prompts(CellIds(range(first, first + codes), row_end), row),
        decoder=decoder,
        codec=codec,
        drafter_net=drafter,
        weights_sha="random",
        drafter_sha=None if drafter is None else "random",
        drafter_layout=CHAMELEON,
    )


def _filled(make: Callable[[], Net], dtype: torch.dtype, device: torch.device) -> Net:
    """Returns what make() builds, with normally distributed matrices, scales of one and shifts of zero."""
    net = cast(Net, on_meta(make)).to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for key, parameter in net.named_parameters():
        if key.endswith("bias"):
            parameter.zero_()
        elif key.endswith(("norm.weight", "qk_weight")):
            parameter.fill_(1)
        else:
            parameter.normal_(std=SCALE)
    return net
