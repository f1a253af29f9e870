"""The Chameleon family's checkpoint layout: configuration, token ids and key map (Anole, Lumina-mGPT, emoji).

Facts: transformers' ChameleonForConditionalGeneration. Queries and keys are half-split there (dimension j
pairs with j + E/2); the decoder here keeps pairs adjacent, so rows of q, k and their norms are permuted on
load and on export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.weights import stacked
from models.transformer import DecoderConfig, read_shape

NORM_EPS = 1e-5  # where config.json is silent


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ChameleonConfig (config.json of transformers 4.4x or 5.x) into a DecoderConfig.

    ValueError for variants that the decoder would otherwise run wrongly without a word.
    """
    if config.get("swin_norm"):
        raise ValueError(f"swin_norm is {config['swin_norm']!r}: this decoder has no such variant")
    return read_shape(config, norm_eps=NORM_EPS)


def drafter_fields(shape: DecoderConfig, cells: int) -> dict[str, Any]:
    """config.json of a drafter whose layer has the target's shape."""
    return {
        "model_type": "chameleon", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions, "bias": True,
    }  # fmt: skip


def interleave(x: Tensor, head_dim: int) -> Tensor:
    """Half-split rotary order -> adjacent pairs, along dimension 0 of x [heads * head_dim, ...]."""
    heads = x.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).flatten(0, 2)


def half_split(x: Tensor, head_dim: int) -> Tensor:
    """The inverse of interleave."""
    heads = x.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def _norm_rows(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """[heads or model-parallel shards, E] -> [heads, E] in interleaved order."""
    rows = x.repeat_interleave(heads // x.shape[0], dim=0)
    return interleave(rows.flatten(), head_dim).view(heads, head_dim)


def block_from_chameleon(
    state: Mapping[str, Tensor], prefix: str, config: DecoderConfig
) -> dict[str, Tensor]:
    """One decoder layer's tensors under our names; prefix ends in a dot ("model.layers.3."). KeyError
    names a gap."""
    size = config.head_dim
    attention = prefix + "self_attn."
    query = interleave(state[attention + "q_proj.weight"], size)
    key = interleave(state[attention + "k_proj.weight"], size)
    ours = {
        "attention.qkv.weight": torch.cat((query, key, state[attention + "v_proj.weight"])),
        "attention.out.weight": state[attention + "o_proj.weight"],
        "mlp.gate_up.weight": stacked(
            state, (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
        ),
        "mlp.down.weight": state[prefix + "mlp.down_proj.weight"],
        "mlp_norm.weight": state[prefix + "post_attention_layernorm.weight"],
    }
    if config.input_norm:
        ours["attention_norm.weight"] = state[prefix + "input_layernorm.weight"]
    if config.qk_norm:
        for name in ("weight", "bias"):
            q = _norm_rows(state[f"{attention}q_norm.{name}"], config.num_heads, size)
            k = _norm_rows(state[f"{attention}k_norm.{name}"], config.num_kv_heads, size)
            ours[f"attention.qk_{name}"] = torch.cat((q, k))
    return ours


def block_to_chameleon(state: Mapping[str, Tensor], prefix: str, config: DecoderConfig) -> dict[str, Tensor]:
    """The inverse of block_from_chameleon for one layer's own state dict."""
    size, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    query, key, value = state["attention.qkv.weight"].split((heads * size, kv_heads * size, kv_heads * size))
    gate, up = state["mlp.gate_up.weight"].chunk(2)
    theirs = {
        "self_attn.q_proj.weight": half_split(query, size),
        "self_attn.k_proj.weight": half_split(key, size),
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": state["attention.out.weight"],
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": state["mlp.down.weight"],
        "post_attention_layernorm.weight": state["mlp_norm.weight"],
    }
    if config.input_norm:
        theirs["input_layernorm.weight"] = state["attention_norm.weight"]
    if config.qk_norm:
        for name in ("weight", "bias"):
            q, k = state[f"attention.qk_{name}"].split((heads, kv_heads))
            theirs[f"self_attn.q_norm.{name}"] = half_split(q.flatten(), size).view(heads, size)
            theirs[f"self_attn.k_norm.{name}"] = half_split(k.flatten(), size).view(kv_heads, size)
    return {prefix + name: tensor.contiguous() for name, tensor in theirs.items()}


def layers_from(state: Mapping[str, Tensor], prefix: str, config: DecoderConfig) -> dict[str, Tensor]:
    """The layers and the final norm of a decoder under our names; prefix: of theirs ("model.")."""
    ours = {"norm.weight": state[f"{prefix}norm.weight"]}
    for layer in range(config.num_layers):
        block = block_from_chameleon(state, f"{prefix}layers.{layer}.", config)
        ours.update({f"blocks.{layer}.{name}": tensor for name, tensor in block.items()})
    return ours


LayersFrom = Callable[[Mapping[str, Tensor], str, DecoderConfig], dict[str, Tensor]]


def layers_to(state: Mapping[str, Tensor], prefix: str, config: DecoderConfig) -> dict[str, Tensor]:
    """The inverse of layers_from."""
    theirs = {f"{prefix}norm.weight": state["norm.weight"]}
    for layer in range(config.num_layers):
        start = f"blocks.{layer}."
        block = {name[len(start) :]: tensor for name, tensor in state.items() if name.startswith(start)}
        theirs.update(block_to_chameleon(block, f"{prefix}layers.{layer}.", config))
    return theirs


def from_chameleon(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    prefix: str = "model.",
    head: str = "lm_head.weight",
    layers: LayersFrom = layers_from,
) -> dict[str, Tensor]:
    """A Decoder's state dict from Chameleon keys (prefix + "*", head); KeyError names what is missing."""
    return {
        "embed.weight": state[f"{prefix}embed_tokens.weight"],
        "head.weight": state[head],
        **layers(state, prefix, config),
    }


def to_chameleon(
    state: Mapping[str, Tensor], config: DecoderConfig, prefix: str = "model.", head: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """Chameleon keys from a Decoder's state dict: the inverse of from_chameleon."""
    return {
        f"{prefix}embed_tokens.weight": state["embed.weight"],
        head: state["head.weight"],
        **layers_to(state, prefix, config),
    }
