"""The shape of a decoder, read from the config.json of its checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.checkpoint.config import integer, number, section


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder, as the configuration of its checkpoint states it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0  # 0 means num_heads
    head_size: int = 0  # 0 means hidden_size / num_heads
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 4096
    qk_norm: bool = False  # queries and keys have a LayerNorm per head (Chameleon)
    input_norm: bool = True  # layers have a norm before attention; LlamaGen's drafters have none
    raster_side: int = 0  # > 0: two-dimensional rotary positions over a raster of this side (LlamaGen)
    raster_start: int = 0  # position of the raster's first code; queries and keys before it become zero
    padded_prefix: bool = False  # positions count the padding before a prompt, which the cache leaves out
    half_split: bool = True  # rotary pairs in the checkpoint: (j, j + E/2), or else (2j, 2j + 1) as here
    head_width: int = 0  # > 0: hidden width of a head of two layers that scores the codes alone (Janus)
    num_codes: int = 0  # number of outputs of such a head
    head_rows: int = 0  # > 0: the head is a matrix with a row for the first head_rows token ids (GLM-Image)
    qkv_bias: bool = False  # the projections of queries, keys and values have biases
    post_norms: bool = False  # attention and MLP end in a norm before they join the stream
    gelu: bool = False  # the MLP's gate has gelu in its tanh form instead of silu (Gemma)
    fp32_scales: bool = False  # scales of norms stay fp32: they are stored less 1 (Gemma)
    # Rotary positions on three axes (GLM-Image): how many pairs of a head each section has. Sections follow
    # the axes in turn; pairs after the last one are not rotated. (): one axis, and all pairs are rotated.
    rope_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """The number of leading dimensions of a head that rotary positions turn."""
        return 2 * sum(self.rope_sections) or self.head_dim


def read_shape(fields: Mapping[str, Any], norm_eps: float = 1e-5) -> DecoderConfig:
    """Returns the shape of a Llama-like decoder from a config.json of transformers (4.4x or 5.x).

    norm_eps: the family's default for rms_norm_eps. Raises KeyError, which names a missing field, or
    ValueError, which names a variant that this decoder does not have and would run wrongly.
    """
    for name in ("attention_bias", "mlp_bias", "swin_norm"):
        if fields.get(name):
            raise ValueError(f"{name} is {fields[name]!r}: this decoder does not have that variant")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {fields['hidden_act']!r}: this decoder only has silu")
    rope = section(fields, "rope_parameters") or section(fields, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions of type {kind!r}: this decoder only has the default ones")
    return DecoderConfig(
        vocab_size=integer(fields, "vocab_size"),
        hidden_size=integer(fields, "hidden_size"),
        intermediate_size=integer(fields, "intermediate_size"),
        num_layers=integer(fields, "num_hidden_layers"),
        num_heads=integer(fields, "num_attention_heads"),
        num_kv_heads=integer(fields, "num_key_value_heads", default=0),
        head_size=integer(fields, "head_dim", default=0),
        norm_eps=number(fields, "rms_norm_eps", norm_eps),
        rope_theta=number(rope, "rope_theta", number(fields, "rope_theta", 10000.0)),
        max_positions=integer(fields, "max_position_embeddings", default=4096),
    )
