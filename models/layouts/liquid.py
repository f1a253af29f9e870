"""Loads Liquid from checkpoints of transformers: a Gemma over text and the codes of Chameleon's VQGAN.

A sequence is the prompt, begin of image, and a square of codes, which are the last token ids. What Gemma
differs in is expressed in its weights where that is exact: the table of embeddings is multiplied by sqrt(D)
on load, rounded as transformers rounds it. Norms are stored less 1, and their scales stay fp32, because 1
more is no number of bf16. The head is the table as stored, also where config.json does not say so.

Meta's VQGAN lies beside the checkpoint, as Anole's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.cell_tokens import CellIds
from models.checkpoint.files import reading
from models.checkpoint.weights import Weights
from models.decoder.config import DecoderConfig, read_shape
from models.family import Checkpoint
from models.layouts.chameleon import read_codec, square_of
from models.layouts.chat import ChatTokenizer
from models.llama_names import Names, decoder_names, gather, tied
from models.model import Model, load_networks
from models.target import PromptEncoder

BEGIN_OF_IMAGE = "<boi>"
INSTRUCTION, NEGATIVE = " Generate an image based on this description.", "<unconditional>"
TANH = "gelu_pytorch_tanh"
# Defaults of transformers' GemmaConfig, which config.json may leave out.
FIELDS = {
    "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "hidden_act": TANH,
    "tie_word_embeddings": True,
}  # fmt: skip


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json. ValueError for a variant that this decoder does not implement."""
    fields = FIELDS | dict(config)
    activation = fields.get("hidden_activation") or fields["hidden_act"]
    if activation not in (TANH, "gelu"):  # Gemma's older files say gelu and mean its tanh form
        raise ValueError(f"hidden_activation is {activation!r}: this decoder has gelu in its tanh form only")
    shape = read_shape(fields | {"hidden_act": "silu"}, norm_eps=1e-6)
    return replace(shape, gelu=True, fp32_scales=True)


def from_gemma(state: Weights, names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Returns a Decoder's state dict from the tensors of a checkpoint. KeyError names a missing tensor."""
    tensors = gather(state, names, config)
    table = tensors["embed.weight"]
    table *= torch.tensor(config.hidden_size**0.5, dtype=table.dtype, device=table.device)
    return {name: 1 + x.float() if name.endswith("norm.weight") else x for name, x in tensors.items()}


def prompt_encoder(tokenizer: ChatTokenizer, codes: range) -> PromptEncoder:
    """Returns an encoder of texts. CheckpointError if the tokenizer lacks begin of image."""
    tokenizer.token(BEGIN_OF_IMAGE)
    after, negative = INSTRUCTION + BEGIN_OF_IMAGE, NEGATIVE + BEGIN_OF_IMAGE
    return tokenizer.prompts("", after, negative, CellIds(codes))


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    folder = checkpoint.folder
    config, state = checkpoint.read()
    with reading(folder / "config.json"):
        shape = decoder_config(config)
    names = tied(decoder_names(shape), state, FIELDS | dict(config))
    codec = read_codec(checkpoint, config, state)
    codes = range(shape.vocab_size - codec.config.num_embeddings, shape.vocab_size)
    prompts = prompt_encoder(ChatTokenizer.of(checkpoint), codes)
    grid = square_of(checkpoint, codec)
    return load_networks(checkpoint, shape, state, names, grid, prompts, codec, to_ours=from_gemma)
