"""Loads Emu3 from checkpoints of transformers: a Llama over text, size and image tokens.

A sequence is BOS, the text, image start, "H*W" in digits, image token, then rows of codes, each followed by a
row end. The tokens after the last row are fixed, so they are not generated. The unconditional branch has the
negative prompt of the model card as its text. transformers' Emu3VQVAE turns codes into pixels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adt_tree.errors import CheckpointError, UserError
from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.checkpoint.config import section
from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module
from models.codecs.vq import VQConfig
from models.decoder.config import DecoderConfig, read_shape
from models.family import Checkpoint
from models.image_tokens import ImageTokens
from models.layouts.chat import ChatTokenizer
from models.llama_names import decoder_names, tied
from models.model import Model, load_networks
from models.target import PromptEncoder, token_prompts

CODE, ROW_END = "<|visual token ", "<|extra_200|>"
IMAGE_START, IMAGE_TOKEN = "<|image start|>", "<|image token|>"
CLOSING = "<|extra_201|>", "<|image end|>", "<|extra_204|>"  # end of the frame, of the image, of the sequence
SIZE = "0123456789*"  # characters that write an image's size in the prompt, such as 90*90; each is a token
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
    "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
# Defaults of transformers' Emu3TextConfig, for older config.json files, which leave these fields out.
TEXT_FIELDS = {
    "vocab_size": 184622, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 9216, "rope_theta": 1e6,
}  # fmt: skip
# Prefix of the decoder's tensor names, name of its head, prefix of the codec's tensor names.
STORED = "text_model.model.", "text_model.lm_head.weight", "vqmodel."  # as save_pretrained writes them
LOADED = "model.text_model.", "lm_head.weight", "model.vqmodel."  # as the loaded model has them


class Emu3Codec(nn.Module):
    """transformers' Emu3VQVAE as a models.codecs.codec.Codec."""

    missing = ""

    def __init__(self, vqmodel: Any) -> None:
        super().__init__()
        self.vqmodel = vqmodel
        fields = vqmodel.config
        self.config = VQConfig(
            num_embeddings=fields.codebook_size,
            base_channels=fields.base_channels,
            channel_multiplier=tuple(fields.channel_multiplier),
            frames=fields.temporal_downsample_factor,
        )

    @property
    def codebook(self) -> Tensor:
        return self.vqmodel.quantize.embedding.weight

    def decode(self, codes: Tensor) -> Tensor:
        return self.vqmodel.decode(codes)

    def encode(self, images: Tensor) -> Tensor:
        sizes = [images.shape[2:]] * len(images)
        return torch.stack(self.vqmodel.encode(images, sizes).image_tokens)


def read_tokens(config: Mapping[str, Any]) -> CellIds:
    """Reads the ids of the codes and of the row end from config.json. KeyError names what is missing."""
    vocabulary = config["vocabulary_map"]
    first, count = vocabulary[f"{CODE}000000|>"], sum(name.startswith(CODE) for name in vocabulary)
    return CellIds(range(first, first + count), vocabulary[ROW_END])


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json. ValueError for a variant that this decoder does not implement."""
    return read_shape(TEXT_FIELDS | section(config, "text_config"))


def grid_of(size: int, ratio: str, patch: int) -> Grid:
    """Returns the raster of an image with about size * size pixels in all and the given ratio, width:height,
    rounded as transformers' processor does. patch: side of a cell in pixels. CheckpointError for a ratio that
    cannot be read, or a size and ratio that leave no image."""
    width, _, height = ratio.partition(":")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise CheckpointError(f"ratio {ratio}: give width:height, for example 16:9")
    scale = (size * size / (int(width) * int(height))) ** 0.5 / patch
    rows, columns = round(int(height) * scale), round(int(width) * scale)
    if rows < 1 or columns < 1:
        raise CheckpointError(
            f"target_size {size}, ratio {ratio}: no whole cell of {patch} pixels fits, give a larger size"
        )
    return Grid(rows, columns, row_ends=True)


def image_tokens(config: Mapping[str, Any]) -> ImageTokens:
    """Returns the description of images among token ids. KeyError names a token that is missing."""
    cells, vocabulary = read_tokens(config), config["vocabulary_map"]
    start, end = vocabulary[IMAGE_START], vocabulary[IMAGE_TOKEN]
    characters = {vocabulary[character]: character for character in SIZE}

    def read_grid(prompts: Sequence[list[int]], image_grid_thw: Tensor | None) -> Grid:
        grids = set()
        for number, ids in enumerate(prompts):
            # The size stands between the last image start and the last token.
            written = ids[len(ids) - ids[::-1].index(start) : -1] if start in ids else []
            size = re.fullmatch(r"(\d+)\*(\d+)", "".join(characters.get(token, "?") for token in written))
            if size is None or ids[-1] != end:
                raise UserError(
                    f"prompt {number} does not end in {IMAGE_START}HEIGHT*WIDTH{IMAGE_TOKEN}: make it by "
                    "Emu3Processor(..., return_for_image_generation=True)"
                )
            grids.add(Grid(int(size[1]), int(size[2]), row_ends=True))
        if len(grids) > 1:
            raise UserError(f"the prompts ask for images of {len(grids)} sizes: give one size at a time")
        return grids.pop()

    closing = tuple(vocabulary[name] for name in CLOSING)
    return ImageTokens(cells.codes, read_grid, cells.row_end, closing)


def vqvae(fields: Mapping[str, Any]) -> Any:
    """Returns transformers' codec for the fields of vq_config, with random weights. Raises what transformers
    does if the fields do not describe one."""
    from transformers import Emu3VQVAE, Emu3VQVAEConfig

    return Emu3VQVAE(Emu3VQVAEConfig(**fields))


def prompt_encoder(tokenizer: ChatTokenizer, cells: CellIds, grid: Grid) -> PromptEncoder:
    """Returns an encoder of texts as BOS, the text, image start, the image's size and image token; the
    unconditional branch has the negative prompt as its text. CheckpointError if the tokenizer does not have
    these image tokens."""
    for name in (IMAGE_START, IMAGE_TOKEN):
        tokenizer.token(name)
    bos, image_start = tokenizer.tokenizer.bos_token, f"{IMAGE_START}{grid.height}*{grid.width}{IMAGE_TOKEN}"

    return tokenizer.prompts(bos, image_start, f"{bos}{NEGATIVE}{image_start}", cells)


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    folder = checkpoint.folder
    config, state = checkpoint.read()
    with reading(folder / "config.json"):
        cells, shape = read_tokens(config), decoder_config(config)
        vq_fields = section(config, "vq_config")
    text, head, vq = LOADED if LOADED[1] in state else STORED
    names = tied(decoder_names(shape, text, head), state, config)
    pixels = state.below(vq).placed(checkpoint.device, torch.float32)
    codec = Emu3Codec(load_module(partial(vqvae, vq_fields), pixels, folder))
    grid = grid_of(checkpoint.size, checkpoint.options.ratio or "1:1", codec.config.patch_size)
    prompts = token_prompts(cells)
    if not checkpoint.only_ids:
        prompts = prompt_encoder(ChatTokenizer.of(checkpoint), cells, grid)
    return load_networks(checkpoint, shape, state, names, grid, prompts, codec)
