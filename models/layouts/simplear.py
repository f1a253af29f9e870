"""Loads SimpleAR from checkpoints of transformers: a Qwen2 over text and the codes of Cosmos' tokenizer.

A sequence is the prompt between two special tokens, then a square of codes, without row ends. The codes are
the last token ids. The unconditional branch has the negative prompt of the released code, whose guidance of
log-probabilities is that of logits: the two differ by a constant for each pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.checkpoint.files import reading
from models.codecs.codec import Codec, CodeVectors
from models.codecs.cosmos import LEVELS, CosmosDecoder, code_vectors
from models.decoder.config import DecoderConfig, read_shape
from models.family import Checkpoint
from models.layouts.chat import ChatTokenizer
from models.llama_names import decoder_names, tied
from models.model import Model, load_networks
from models.target import PromptEncoder

OPENING, IMAGE_START = "<|t2i|>", "<|soi|>"
POSITIVE = "A highly realistic image of "
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, "
    "bad teeth, bad eyes, bad limbs, distortion"
)
NUM_CODES, CELL = math.prod(LEVELS), 16  # CELL: pixels along the side of a code's cell
NOT_TRUSTED = (
    "simplear gives codes: its decoder of pixels is TorchScript, which is code; trust_torchscript runs it"
)
PIXELS = ("Cosmos-1.0-Tokenizer-DV8x16x16/decoder.jit", "decoder.jit")


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json. ValueError for a variant that this decoder does not implement."""
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true: this decoder does not have that variant")
    shape = read_shape(config, norm_eps=1e-6)
    return replace(shape, qkv_bias=True)


def grid_of(size: int) -> Grid:
    """Returns the raster of an image of size x size pixels. CheckpointError unless its cells are whole."""
    if size % CELL:
        raise CheckpointError(f"target_size {size}: it must be a multiple of {CELL}, such as 512 or 1024")
    return Grid(size // CELL, size // CELL)


def prompt_encoder(tokenizer: ChatTokenizer, codes: range) -> PromptEncoder:
    """Returns an encoder of texts; the unconditional branch has the negative prompt. CheckpointError if the
    tokenizer lacks the special tokens."""
    for name in (OPENING, IMAGE_START):
        tokenizer.token(name)
    negative = f"{OPENING}{NEGATIVE}{IMAGE_START}"
    return tokenizer.prompts(f"{OPENING}{POSITIVE}", IMAGE_START, negative, CellIds(codes))


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint, with a decoder of pixels only where TorchScript is trusted.
    CheckpointError names what is missing or does not fit."""
    folder, options = checkpoint.folder, checkpoint.options
    config, state = checkpoint.read()
    with reading(folder / "config.json"):
        shape = decoder_config(config)
    grid = grid_of(checkpoint.size)
    names = tied(decoder_names(shape), state, config)
    codes = range(shape.vocab_size - NUM_CODES, shape.vocab_size)
    prompts = prompt_encoder(ChatTokenizer.of(checkpoint), codes)
    codec: Codec = CodeVectors(code_vectors(checkpoint.device), NOT_TRUSTED)
    if options.trust_torchscript:
        codec = CosmosDecoder(checkpoint.part("decoder of pixels", PIXELS, "vq_path"), checkpoint.device)
    return load_networks(checkpoint, shape, state, names, grid, prompts, codec)
