"""Loads the autoregressive stage of GLM-Image from checkpoints of transformers: it generates codes.

A sequence is the user's turn of the chat template, the rows and columns of the image and then of its preview
in digits, image start, the codes of the preview, and those of the image. Code k is token id k, rows have no
separators, and there is no unconditional branch. The codes become pixels in a diffusion model beside the
checkpoint (models/codecs/glm_pixels.py). The encoder of images and the VQ encoder are never read.

In the published repository, a pipeline of diffusers, the model lies in vision_language_encoder/ and its
tokenizer in processor/ beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from models.cell_tokens import CellIds
from models.checkpoint.config import integer, integers, section
from models.checkpoint.files import reading
from models.codecs.codec import CodeVectors
from models.codecs.glm_pixels import CELL, DiffusionDecoder
from models.decoder.config import DecoderConfig, read_shape
from models.family import Checkpoint, ModelFamily
from models.image_tokens import ImageTokens
from models.layouts.chat import ChatTokenizer
from models.llama_names import POST_NORM_BLOCK, decoder_names
from models.model import Model, load_networks
from models.target import Prompt, PromptEncoder, token_prompts

PREVIEW = 16  # cells along the side of a square image's preview, as in transformers' processor
NO_PIXELS = "glm_image gives codes, and only generate_images can turn them into pixels"
SIDE = 1024  # default of height and width in pixels
SECTIONS = (8, 12, 12)  # default of mrope_section in transformers
CODEBOOK = "model.vqmodel.quantize.embedding.weight"


def read_tokens(config: Mapping[str, Any]) -> tuple[range, int, int]:
    """Reads the ids of the codes, of image start and of image end. KeyError names what is missing."""
    return (
        range(config["vq_config"]["num_embeddings"]),
        config["image_start_token_id"],
        config["image_end_token_id"],
    )


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json. ValueError for a variant that this decoder does not implement."""
    codes, *_ = read_tokens(config)
    text = config["text_config"]
    return replace(
        read_shape({**text, "attention_bias": False}, norm_eps=1e-5),
        qkv_bias=text.get("attention_bias", True),
        post_norms=True,
        rope_sections=integers(section(text, "rope_parameters"), "mrope_section") or SECTIONS,
        head_rows=integer(text, "vision_vocab_size"),
        num_codes=len(codes),
    )


def grid_of(height: int, width: int) -> Grid:
    """Returns the rasters of an image of these pixels: its preview of about PREVIEW * PREVIEW cells, whatever
    the image's size, and the image itself. UserError for sides that are not multiples of CELL."""
    for name, pixels in (("height", height), ("width", width)):
        if pixels < CELL or pixels % CELL:
            raise UserError(f"{name} {pixels}: give a positive multiple of {CELL} pixels")
    rows, columns = height // CELL, width // CELL
    ratio = rows / columns
    preview = Raster(int(math.sqrt(ratio) * PREVIEW), int(math.sqrt(1 / ratio) * PREVIEW))
    return Grid(rows, columns, before=(preview,))


def prompt_encoder(tokenizer: ChatTokenizer, config: Mapping[str, Any], grid: Grid) -> PromptEncoder:
    """Returns an encoder of texts as the user's turn of the chat template, the sizes of the image and of its
    preview, and image start. CheckpointError if the tokenizer lacks one of these tokens."""
    codes, *_ = read_tokens(config)
    bos, opening, closing = (
        tokenizer.special(name) for name in ("bos_token", "grid_bos_token", "grid_eos_token")
    )
    tokenizer.turn("", answer=False)  # raises now if the template is missing or broken
    sizes = "".join(f"{opening}{part.height} {part.width}{closing}" for part in reversed(grid.rasters))

    def encode(text: str) -> Prompt:
        return Prompt(tokenizer.ids(tokenizer.turn(text, answer=False) + sizes + bos), None)

    return PromptEncoder(encode, CellIds(codes), guided=False, control=tokenizer.control)


def image_tokens(config: Mapping[str, Any]) -> ImageTokens:
    """Returns the description of images among token ids. KeyError names a missing field of config.json."""
    codes, start, end = read_tokens(config)

    def read_grid(prompts: Sequence[list[int]], image_grid_thw: Tensor | None) -> Grid:
        for number, ids in enumerate(prompts):
            if ids[-1] != start or end in ids:
                raise UserError(
                    f"prompt {number} does not end in image start, {start}, or holds a source image: make it "
                    "by GlmImageProcessor from a text alone"
                )
        sides = [] if image_grid_thw is None else image_grid_thw.tolist()
        # Two rows for each prompt, the image's and then its preview's; transformers also takes two for all.
        pairs = {(*image[1:], *preview[1:]) for image, preview in zip(sides[::2], sides[1::2], strict=False)}
        if len(sides) not in (2, 2 * len(prompts)) or len(pairs) != 1:
            raise UserError(
                f"image_grid_thw: {sides} for {len(prompts)} prompts; give two rows for each, (1, rows, "
                "columns) of the image and of its preview, and one size at a time"
            )
        rows, columns, preview_rows, preview_columns = pairs.pop()
        return Grid(rows, columns, before=(Raster(preview_rows, preview_columns),))

    return ImageTokens(codes, read_grid, open_end=True)


def processor_folder(folder: Path) -> Path:
    """Returns the folder of a model's tokenizer: processor/ beside the model, or else the model's folder."""
    beside = folder.parent / "processor"
    inside = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return folder if inside or not beside.is_dir() else beside


def with_generation(spec: ModelFamily, fields: Mapping[str, Any]) -> ModelFamily:
    """Returns the family with the defaults of sampling that a generation_config.json states."""
    names = ("temperature", "top_p", "top_k")
    return replace(spec, **{name: fields[name] for name in names if fields.get(name) is not None})


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    folder, options = checkpoint.folder, checkpoint.options
    config, state = checkpoint.read()
    with reading(folder / "config.json"):
        shape = decoder_config(config)
    if options.target_size is not None:
        raise UserError(f"target_size {options.target_size}: give height and width instead")
    grid = grid_of(options.height or SIDE, options.width or SIDE)
    names = decoder_names(shape, "model.language_model.", block=POST_NORM_BLOCK)
    prompts = token_prompts(CellIds(range(shape.num_codes)), guided=False)
    if not checkpoint.only_ids:
        chat = ChatTokenizer.of(checkpoint, processor_folder(folder))
        spec = with_generation(checkpoint.spec, chat.generation)
        checkpoint, prompts = replace(checkpoint, spec=spec), prompt_encoder(chat, config, grid)
    prompts = replace(prompts, images=image_tokens(config))
    with reading(folder):
        vectors = state.placed(checkpoint.device, torch.float32)[CODEBOOK].detach()
    # The VQ encoder compares code vectors of length 1.
    codec = CodeVectors(F.normalize(vectors, dim=-1), NO_PIXELS)
    read = state.renamed({name: name for parts in names.values() for name in parts if name in state})
    model = load_networks(checkpoint, shape, read, names, grid, prompts, codec)
    diffusion = None
    if checkpoint.loaded is None:  # the diffusion model lies beside the files
        diffusion = DiffusionDecoder(folder.parent, checkpoint.device, checkpoint.dtype)
    return replace(model, diffusion=diffusion)
