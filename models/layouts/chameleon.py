"""The Chameleon family's layout (Anole, Lumina-mGPT, emoji): configuration and names of a decoder's tensors.

Facts: transformers' ChameleonForConditionalGeneration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.layouts.llama import decoder_names, gather, scatter
from models.transformer import DecoderConfig, read_shape

NORM_EPS = 1e-5  # where config.json is silent


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ChameleonConfig (config.json of transformers 4.4x or 5.x) into a DecoderConfig.

    ValueError for variants that the decoder would otherwise run wrongly without a word.
    """
    if config.get("swin_norm"):
        raise ValueError(f"swin_norm is {config['swin_norm']!r}: this decoder has no such variant")
    return read_shape(config, norm_eps=NORM_EPS)


def drafter_fields(shape: DecoderConfig) -> dict[str, Any]:
    """config.json of a drafter whose layer has the target's shape."""
    return {
        "model_type": "chameleon", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions, "bias": True,
    }  # fmt: skip


def from_chameleon(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    prefix: str = "model.",
    head: str = "lm_head.weight",
) -> dict[str, Tensor]:
    """A Decoder's state dict from Chameleon keys (prefix + "*", head); KeyError names what is missing."""
    return gather(state, decoder_names(config, prefix, head), config, half_split=True)


def to_chameleon(
    state: Mapping[str, Tensor], config: DecoderConfig, prefix: str = "model.", head: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """Chameleon keys from a Decoder's state dict: the inverse of from_chameleon."""
    return scatter(state, decoder_names(config, prefix, head), config, half_split=True)
