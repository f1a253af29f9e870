"""Loads Janus-Pro from checkpoints of transformers: a Llama with an input aligner and a head for image codes.

As in transformers' JanusForConditionalGeneration, image codes are embedded by generation_embeddings followed
by generation_aligner. The result of both is computed once on load and appended to the table of text
embeddings, so that token id = size of the text vocabulary + code. The unconditional branch has the ids of the
conditional one, with all but BOS and begin of image replaced by padding. The VQ model is LlamaGen's: it looks
codes up l2-normalised. Its pixels are truncated to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.checkpoint.config import section
from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module, on_meta
from models.checkpoint.weights import Weights
from models.codecs.vq import VQConfig, VQModel
from models.codecs.vq16 import janus_names
from models.decoder.config import DecoderConfig, read_shape
from models.decoder.transformer import make_head
from models.family import Checkpoint
from models.layouts.chat import ChatTokenizer
from models.llama_names import Names, gather, layer_names
from models.model import Model, load_networks
from models.target import Prompt, PromptEncoder

BEGIN_OF_IMAGE = "<begin_of_image>"
TEXT, VQ = "model.language_model.", "model.vqmodel."
EMBED = f"{TEXT}embed_tokens.weight"
ALIGNER, HEAD = "model.generation_aligner.", "model.generation_head."
CODES = "model.generation_embeddings.weight"
# Defaults of transformers' classes, for older config.json files, which leave these fields out.
LLAMA_FIELDS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
VQ_FIELDS: dict[str, Any] = {
    "embed_dim": 8, "num_embeddings": 16384, "latent_channels": 256, "in_channels": 3, "base_channels": 128,
    "channel_multiplier": (1, 1, 2, 2, 4), "num_res_blocks": 2, "projection_dim": 2048,
}  # fmt: skip
VISION_FIELDS: dict[str, Any] = {"image_size": 384, "patch_size": 16}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json. ValueError for a variant that this decoder does not implement."""
    vq = VQ_FIELDS | section(config, "vq_config")
    shape = read_shape(LLAMA_FIELDS | section(config, "text_config"), norm_eps=1e-6)
    return replace(
        shape,
        vocab_size=shape.vocab_size + vq["num_embeddings"],
        head_width=vq["projection_dim"],
        num_codes=vq["num_embeddings"],
    )


def vq_config(config: Mapping[str, Any]) -> VQConfig:
    """Returns the shape of the VQ model; its resolution is the size of the images that are generated."""
    vq, vision = VQ_FIELDS | section(config, "vq_config"), VISION_FIELDS | section(config, "vision_config")
    side, levels = vision["image_size"] // vision["patch_size"], len(vq["channel_multiplier"])
    shape = VQConfig.from_hf(vq | {"resolution": side << (levels - 1), "attn_resolutions": [side]})
    return replace(shape, normalises=True)


def code_table(state: Mapping[str, Tensor]) -> Tensor:
    """Returns aligner(embedding) of every code, [V, D], computed in fp32. KeyError names a missing tensor."""

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{ALIGNER}{name}.weight"].float(), state[f"{ALIGNER}{name}.bias"].float())

    x, depth = layer("fc1", state[CODES].float()), 0
    while f"{ALIGNER}hidden_layers.{depth}.weight" in state:
        x, depth = layer(f"hidden_layers.{depth}", F.gelu(x)), depth + 1
    return x


def janus_layers(config: DecoderConfig) -> Names:
    """Returns the names of a Decoder's tensors except its table of embeddings, as in models.llama_names."""
    head = {f"head.{name}": (HEAD + name,) for name in on_meta(lambda: make_head(config)).state_dict()}
    return head | layer_names(config, TEXT)


def from_janus(state: Weights, names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Returns a Decoder's state dict from the tensors of a checkpoint. KeyError names a missing tensor."""
    text = state[EMBED]
    table = torch.cat((text, code_table(state).to(text.dtype)))
    state.share({EMBED: table[: len(text)]})
    return {"embed.weight": table} | gather(state, names, config)


def prompt_encoder(tokenizer: ChatTokenizer, shape: DecoderConfig) -> PromptEncoder:
    """Returns an encoder of texts as the user's turn of the chat template followed by begin of image; the
    unconditional branch has the same length, with padding for the text.

    The ids of BOS and padding come from generation_config.json, as in transformers' generate(), or else from
    the tokenizer. CheckpointError if the tokenizer has no begin of image.
    """
    fields, text_size = tokenizer.generation, shape.vocab_size - shape.num_codes
    begin, padding = (
        fields[name] if fields.get(name) is not None else getattr(tokenizer.tokenizer, name)
        for name in ("bos_token_id", "pad_token_id")
    )
    tokenizer.turn("")  # raises now if the template is missing or broken
    never_padded = (begin, tokenizer.token(BEGIN_OF_IMAGE))  # in the unconditional branch

    def encode(text: str) -> Prompt:
        ids = tokenizer.ids(tokenizer.turn(text) + BEGIN_OF_IMAGE)
        return Prompt(ids, [token if token in never_padded else padding for token in ids])

    return PromptEncoder(encode, CellIds(range(text_size, shape.vocab_size)), control=tokenizer.control)


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    folder = checkpoint.folder
    config, state = checkpoint.read()
    with reading(folder / "config.json"):
        shape, vq = decoder_config(config), vq_config(config)
    checkpoint.refuse_other_size(vq.resolution)
    prompts = prompt_encoder(ChatTokenizer.of(checkpoint), shape)
    vq_names = {ours: VQ + name for ours, name in janus_names(vq).items()}
    pixels = state.placed(checkpoint.device, torch.float32)
    codec = load_module(lambda: VQModel(vq), pixels, folder, lambda stored: stored.renamed(vq_names))
    side, names = vq.attn_resolutions[0], janus_layers(shape)
    grid = Grid(side, side)
    return load_networks(checkpoint, shape, state, names, grid, prompts, codec, to_ours=from_janus)
