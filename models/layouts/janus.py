"""Janus-Pro from transformers' own checkpoints: a Llama that takes image codes through an aligner of its own
and tells them through a head of its own.

Published facts (transformers' JanusForConditionalGeneration): codes enter by generation_embeddings and
generation_aligner, folded here into rows behind the text's table, so that token id = text vocabulary + code;
the unconditional branch is the same ids with all but BOS and begin of image replaced by padding. The VQ model
is LlamaGen's, its codes looked up l2-normalised, its pixels truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.checkpoint.config import (
    MOST_LAYERS,
    MOST_PIXELS,
    MOST_TOKENS,
    MOST_WIDTH,
    read_config,
    read_fields,
    section,
    whole,
    wholes,
)
from models.checkpoint.meta_init import build, expected, on_meta, require
from models.checkpoint.weights import Weights, read_weights
from models.codecs.vq import VQConfig, VQModel
from models.codecs.vq16 import janus_names
from models.drafter import LLAMA
from models.layouts.chat import ChatTokenizer
from models.layouts.llama import Names, gather, layer_names, scatter
from models.model import Model, load_networks
from models.spec import Checkpoint, Shapes
from models.target import Prompt, PromptEncoder
from models.transformer import Decoder, DecoderConfig, make_head, read_shape

BEGIN_OF_IMAGE = "<begin_of_image>"
TEXT, VQ = "model.language_model.", "model.vqmodel."
EMBED = f"{TEXT}embed_tokens.weight"
ALIGNER, HEAD = "model.generation_aligner.", "model.generation_head."
CODES = "model.generation_embeddings.weight"
# Defaults of transformers' classes, which older files leave out.
LLAMA_FIELDS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
VQ_FIELDS = {
    "embed_dim": 8, "num_embeddings": 16384, "double_latent": False, "latent_channels": 256, "in_channels": 3,
    "out_channels": 3, "base_channels": 128, "channel_multiplier": (1, 1, 2, 2, 4), "num_res_blocks": 2,
    "projection_dim": 2048, "num_hidden_layers": 2, "hidden_act": "gelu", "image_token_embed_dim": 2048,
}  # fmt: skip
VISION_FIELDS = {"image_size": 384, "patch_size": 16}


def _vq_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """vq_config with its defaults. ValueError if config.json is no Janus'."""
    if config.get("model_type") != "janus":
        raise ValueError(f"model_type is {config.get('model_type')!r}: this is no checkpoint of Janus-Pro")
    fields = VQ_FIELDS | dict(section(config, "vq_config"))
    for name in ("num_embeddings", "embed_dim", "projection_dim", "image_token_embed_dim"):
        whole(fields, name, MOST_TOKENS)
    whole(fields, "num_hidden_layers", MOST_LAYERS)
    return fields


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """From config.json. ValueError for variants that the decoder would run wrongly without a word."""
    vq = _vq_fields(config)
    shape = read_shape(LLAMA_FIELDS | dict(section(config, "text_config")), norm_eps=1e-6)
    if vq["hidden_act"] != "gelu":
        raise ValueError(f"vq_config.hidden_act is {vq['hidden_act']!r}: this head has gelu only")
    for name in ("projection_dim", "image_token_embed_dim"):
        if vq[name] != shape.hidden_size:
            raise ValueError(f"vq_config.{name} is {vq[name]}, text_config.hidden_size {shape.hidden_size}")
    return replace(
        shape,
        vocab_size=shape.vocab_size + vq["num_embeddings"],
        qk_norm=False,
        head_width=vq["projection_dim"],
        num_codes=vq["num_embeddings"],
    )


def vq_config(config: Mapping[str, Any]) -> VQConfig:
    """The VQ model and, by its resolution, the image that is drawn."""
    vq, vision = _vq_fields(config), VISION_FIELDS | dict(section(config, "vision_config"))
    if vq["in_channels"] != vq["out_channels"]:
        raise ValueError("vq_config: in_channels and out_channels must be equal")
    sides = [whole(vision, name, MOST_PIXELS) for name in ("image_size", "patch_size")]
    side, levels = sides[0] // sides[1], len(wholes(vq, "channel_multiplier", MOST_WIDTH))
    if side < 1 or not levels:
        raise ValueError("vision_config and vq_config.channel_multiplier leave no image")
    shape = VQConfig.from_hf(vq | {"resolution": side << (levels - 1), "attn_resolutions": [side]})
    return replace(shape, normalises=True)


def code_table(state: Mapping[str, Tensor]) -> Tensor:
    """aligner(embedding) of every code [V, D], computed in fp32. KeyError names what is missing."""

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{ALIGNER}{name}.weight"].float(), state[f"{ALIGNER}{name}.bias"].float())

    x, depth = layer("fc1", state[CODES].float()), 0
    while f"{ALIGNER}hidden_layers.{depth}.weight" in state:
        x, depth = layer(f"hidden_layers.{depth}", F.gelu(x)), depth + 1
    return x


def janus_layers(config: DecoderConfig) -> Names:
    """Our names of a Decoder's tensors, all but its table of tokens -> the checkpoint's."""
    head = {f"head.{name}": (HEAD + name,) for name in on_meta(lambda: make_head(config)).state_dict()}
    return head | layer_names(config, TEXT)


def from_janus(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """A Decoder's state dict from transformers' keys; KeyError names what is missing."""
    text = state[EMBED]
    table = torch.cat((text, code_table(state).to(text.dtype)))
    if isinstance(state, Weights):
        state.share({EMBED: table[: len(text)]})
    return {"embed.weight": table} | gather(state, janus_layers(config), config)


def wanted(config: Mapping[str, Any], shape: DecoderConfig) -> Shapes:
    """Names and shapes of the tensors that draw images; those that see or write text are not read."""
    vq, width, codec = _vq_fields(config), shape.hidden_size, vq_config(config)
    tables: dict[str, tuple[int, ...]] = {
        EMBED: (shape.vocab_size - shape.num_codes, width),
        CODES: (shape.num_codes, vq["embed_dim"]),
        f"{ALIGNER}fc1.weight": (width, vq["embed_dim"]),
        f"{ALIGNER}fc1.bias": (width,),
    }
    for layer in range(vq["num_hidden_layers"] - 1):
        tables[f"{ALIGNER}hidden_layers.{layer}.weight"] = (width, width)
        tables[f"{ALIGNER}hidden_layers.{layer}.bias"] = (width,)
    layers = expected(lambda: Decoder(shape), lambda own: scatter(own, janus_layers(shape), shape))
    names = janus_names(codec)
    pixels = expected(lambda: VQModel(codec), lambda own: {VQ + names[name]: own[name] for name in own})
    return tables | layers | pixels


def prompt_encoder(tokenizer: ChatTokenizer, shape: DecoderConfig) -> PromptEncoder:
    """Texts -> the chat's turn and the begin of image; uncond of the same length, its text padded over.

    Ids are those of generation_config.json, as in transformers' own generate. CheckpointError if neither it
    nor the tokenizer has them, or text would become ids of another vocabulary.
    """
    own, fields, text_size = tokenizer.tokenizer, tokenizer.generation, shape.vocab_size - shape.num_codes
    begin, padding = (
        fields[name] if fields.get(name) is not None else getattr(own, name)
        for name in ("bos_token_id", "pad_token_id")
    )
    for name, value in (("bos_token_id", begin), ("pad_token_id", padding)):
        if not isinstance(value, int) or not 0 <= value < text_size:
            raise CheckpointError(
                f"{tokenizer.source}: {name} is {value!r}: generation_config.json must name one of the "
                f"{text_size} text tokens"
            )
    tokenizer.turn("")  # a template that is missing or broken is known now
    kept = (begin, tokenizer.token(BEGIN_OF_IMAGE))
    highest = max(own.get_vocab().values(), default=0)
    if highest >= text_size:
        raise CheckpointError(
            f"{tokenizer.source}: the tokenizer has ids up to {highest}, config.json's text vocabulary "
            f"{text_size}: give the tokenizer of this model"
        )

    def encode(text: str) -> Prompt:
        ids = tokenizer.ids(tokenizer.turn(text) + BEGIN_OF_IMAGE)
        return Prompt(ids, [token if token in kept else padding for token in ids])

    return PromptEncoder(encode, text_size, shape.num_codes)


def load(checkpoint: Checkpoint) -> Model:
    """Janus-Pro from its files. CheckpointError names what is missing or does not fit."""
    folder = checkpoint.folder
    config, state = read_config(folder), read_weights(folder)
    return assemble(checkpoint, config, state, lambda: ChatTokenizer.read(folder))


def assemble(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    state: Weights,
    tokenizer: Callable[[], ChatTokenizer],
) -> Model:
    """Janus-Pro of that configuration and those weights.

    The tokenizer is opened when config.json has been checked: transformers reads it too, and says less of it.
    """
    folder = checkpoint.folder
    shape, vq = read_fields(folder, lambda: (decoder_config(config), vq_config(config)))
    checkpoint.refuse_other_size(vq.resolution)
    tensors = read_fields(folder, lambda: wanted(config, shape))
    require(folder, state, tensors, "fetch it again, or the config.json that belongs to it")
    prompts = prompt_encoder(tokenizer(), shape)
    pixels = state.below(VQ).renamed(janus_names(vq)).placed(checkpoint.device, torch.float32)
    codec = build(lambda: VQModel(vq), pixels, folder)
    side, to_ours = vq.attn_resolutions[0], partial(from_janus, config=shape)
    return load_networks(checkpoint, shape, state, to_ours, LLAMA, Grid(side, side), prompts, codec)
