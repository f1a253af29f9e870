"""One decoder for every autoregressive image model of this project, driven by a configuration.

RMSNorm, SwiGLU, optional LayerNorm on queries and keys per head, rotary positions in fp32, a preallocated
cache. Queries and keys are in interleaved rotary order (pairs 2j, 2j+1), so that the rotation is one complex
product; key maps permute checkpoints on load.

Dimensions: R rows, N nodes, T tokens, D features, H heads, E head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import AttentionMetadata, KVCache
from models.checkpoint.config import (
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_TOKENS,
    MOST_WIDTH,
    positive,
    section,
    whole,
)

QK_NORM_EPS = 1e-5  # fixed in the published Chameleon code, not in its configuration


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder; every value is read from the checkpoint's own configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0  # 0: as many as num_heads
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 4096
    qk_norm: bool = True
    input_norm: bool = True  # the LlamaGen drafter's layer has no norm before attention
    raster_side: int = 0  # > 0: two-dimensional rotary positions over a raster of this side (LlamaGen)
    raster_start: int = 0  # position of its first code; what lies before is zeroed, not rotated
    head_width: int = 0  # > 0: the head is two layers with GELU between them, over image codes alone (Janus)
    num_codes: int = 0  # what such a head tells apart

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        for name in ("hidden_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size}, num_heads {self.num_heads} and num_kv_heads "
                f"{self.num_kv_heads} do not divide one another"
            )
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim}: rotary positions turn pairs, it must be even")
        if self.raster_side and self.head_dim % 4:
            raise ValueError(f"head size {self.head_dim}: positions by row and column need a multiple of 4")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads


def read_shape(fields: Mapping[str, Any], norm_eps: float = 1e-5) -> DecoderConfig:
    """The fields that every config.json of transformers (4.4x or 5.x) for a Llama-like decoder has.

    norm_eps: what the family's own class takes where rms_norm_eps is not given. KeyError names a field that
    is missing; ValueError a variant that the decoder would otherwise run wrongly without a word.
    """
    for name in ("attention_bias", "mlp_bias", "swin_norm"):
        if fields.get(name):
            raise ValueError(f"{name} is {fields[name]!r}: this decoder has no such variant")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {fields['hidden_act']!r}: this decoder has silu only")
    rope = section(fields, "rope_parameters") or section(fields, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions of type {kind!r}: this decoder has plain ones only")
    shape = DecoderConfig(
        vocab_size=whole(fields, "vocab_size", MOST_TOKENS),
        hidden_size=whole(fields, "hidden_size", MOST_WIDTH),
        intermediate_size=whole(fields, "intermediate_size", MOST_WIDTH),
        num_layers=whole(fields, "num_hidden_layers", MOST_LAYERS),
        num_heads=whole(fields, "num_attention_heads", MOST_WIDTH),
        num_kv_heads=whole(fields, "num_key_value_heads", MOST_WIDTH, default=0),
        norm_eps=positive(fields, "rms_norm_eps", norm_eps),
        rope_theta=positive(rope, "rope_theta", positive(fields, "rope_theta", 10000.0)),
        max_positions=whole(fields, "max_position_embeddings", MOST_POSITIONS, default=4096),
    )
    if fields.get("head_dim") not in (None, shape.head_dim):
        raise ValueError(
            f"head_dim is {fields['head_dim']}, hidden_size / num_attention_heads {shape.head_dim}: this "
            "decoder has heads of that size only"
        )
    return shape


def rotary_table(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor:
    """exp(i * position * theta^(-2j/E)): complex64 [max_positions, E/2], computed in fp64 and kept out of
    casts.

    Over a raster (LlamaGen) the first half of the pairs turns by the row, the second by the column. Zero
    before and behind it: queries and keys there become zero, so a text prefix attends and is attended to
    evenly, whatever its order.
    """
    side, start = config.raster_side, config.raster_start
    if not side:
        return _turns(config.max_positions, config.head_dim, config.rope_theta, device)
    turn = _turns(side, config.head_dim // 2, config.rope_theta, device)
    rows, columns = turn[:, None].expand(-1, side, -1), turn[None].expand(side, -1, -1)
    table = turn.new_zeros(config.max_positions, config.head_dim // 2)
    table[start : start + side * side] = torch.cat((rows, columns), dim=-1).flatten(0, 1)
    return table


def _turns(count: int, size: int, theta: float, device: torch.device | str) -> Tensor:
    """exp(i * n * theta^(-2j/size)) for n < count: [count, size/2]."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    # fp32 frequencies, as every published implementation has them.
    frequency = (1.0 / theta**exponent).float()
    angles = torch.arange(count, device=device).float()[:, None] * frequency
    return torch.polar(torch.ones_like(angles), angles)


def as_pairs(x: Tensor) -> Tensor:
    """The pairs [..., E] of fp32 x that turn together, as complex numbers [..., E/2] in its memory."""
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate x [..., H, E] by turn [..., 1, E/2] (complex) in fp32; returns x's dtype."""
    return torch.view_as_real(as_pairs(x.float()) * turn).view(x.shape).type_as(x)


def split_heads(
    fused: Tensor, turn: Tensor, heads: int, kv_heads: int, affine: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Queries [..., H, E], and keys followed by values [..., 2 * Hkv, E], out of a fused projection
    [..., (H + 2 Hkv) E]: queries and keys normed, where there is a scale and a shift [H + Hkv, E], and
    rotated."""
    fused = fused.view(*fused.shape[:-1], heads + 2 * kv_heads, -1)
    count = heads + kv_heads
    qk, value = fused.narrow(-2, 0, count), fused.narrow(-2, count, kv_heads)
    if affine is not None:
        # Values are normed for nothing: queries and keys alone would be copied first.
        normed = F.layer_norm(fused, fused.shape[-1:], eps=QK_NORM_EPS).narrow(-2, 0, count)
        qk = torch.addcmul(affine[1], normed, affine[0])
    qk = rotate(qk, turn)
    return qk.narrow(-2, 0, heads), torch.cat((qk.narrow(-2, heads, kv_heads), value), dim=-2)


def attend_causally(query: Tensor, kv: Tensor) -> Tensor:
    """Returns what every token reads of itself and all tokens before it, without a cache: [R, T, H * E] from
    query [R, T, H, E], kv [R, T, 2 * Hkv, E]."""
    return attend_densely(query, kv, is_causal=True)


def attend_densely(query: Tensor, kv: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Returns what T tokens read of S, [R, T, H * E], from query [R, T, H, E] and kv [R, S, 2 * Hkv, E]; mask
    [T, S] bool: who may read whom. Keys and values shared by several heads are repeated, because CUDA's
    memory-efficient kernel does not take shared ones."""
    if 2 * query.shape[2] > kv.shape[2]:
        kv = kv.repeat_interleave(2 * query.shape[2] // kv.shape[2], dim=2)
    key, value = kv.transpose(1, 2).chunk(2, dim=1)
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, is_causal=is_causal)
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention with one fused projection for queries, keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            shape = (self.heads + self.kv_heads, self.head_dim)
            self.qk_weight = nn.Parameter(torch.ones(shape))
            self.qk_bias = nn.Parameter(torch.zeros(shape))

    @property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Scale and shift of the norm of queries and keys, if they have one."""
        return (self.qk_weight, self.qk_bias) if self.qk_norm else None

    def project(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and keys with values, of x [..., D]."""
        return split_heads(self.qkv(x), turn, self.heads, self.kv_heads, self.affine)

    def forward(self, x: Tensor, turn: Tensor, store: Tensor, meta: AttentionMetadata) -> Tensor:
        """Tree nodes x [R * N, D] over the committed prefix and their ancestors."""
        return self.out(meta.attend(store, *self.project(x, turn)))

    def causal(self, x: Tensor, turn: Tensor) -> Tensor:
        """Whole sequences x [R, T, D], without a cache."""
        return self.out(attend_causally(*self.project(x, turn)))


class MLP(nn.Module):
    """SwiGLU with gate and up projections fused."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)); x [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm: nn.Module = (
            nn.RMSNorm(config.hidden_size, config.norm_eps) if config.input_norm else nn.Identity()
        )
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, turn: Tensor, store: Tensor, meta: AttentionMetadata) -> Tensor:
        """Tree nodes x [R * N, D] -> [R * N, D]; their keys and values are written into the layer's cache,
        `store`. turn [R * N, 1, E/2]."""
        x = x + self.attention(self.attention_norm(x), turn, store, meta)
        return x + self.mlp(self.mlp_norm(x))

    def causal(self, x: Tensor, turn: Tensor) -> Tensor:
        """The same layer over whole sequences, without a cache."""
        x = x + self.attention.causal(self.attention_norm(x), turn)
        return x + self.mlp(self.mlp_norm(x))


def make_head(config: DecoderConfig) -> nn.Linear | nn.Sequential:
    """A matrix over the whole vocabulary, or two layers over the image codes (Janus' generation_head)."""
    if not config.head_width:
        return nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    first = nn.Linear(config.hidden_size, config.head_width)
    second = nn.Linear(config.head_width, config.num_codes)
    return nn.Sequential(OrderedDict(proj_out=first, gelu=nn.GELU(), vision_head=second))


class Positioned(nn.Module):
    """What a decoder and its drafter have in common: a token embedding and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        # A plain attribute, real even where the module is built on the meta device: a cast of the module must
        # not touch it (a bf16 table is off by .6 rad at position 500).
        self.rotary = rotary_table(config)

    def reserve(self, positions: int) -> None:
        """Make the rotary table longer where it has fewer positions."""
        if positions > len(self.rotary):
            longer = replace(self.config, max_positions=positions)
            self.rotary = rotary_table(longer, self.rotary.device)

    def turn(self, positions: Tensor) -> Tensor:
        """Rotations [R, N, 1, E/2] at positions [R, N]."""
        if self.rotary.device != positions.device:
            self.rotary = self.rotary.to(positions.device)
        return self.rotary[positions].unsqueeze(2)


class Decoder(Positioned):
    """Embedding, blocks, norm and head. `forward` is for decoding, `causal` for training and scoring."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = make_head(config)

    def cut_head(self, first_code: int, num_codes: int, copy: bool = True) -> None:
        """Keeps only the rows of the head that score the codes: no other token's logit is ever computed.

        copy: into memory of their own, so that the whole head's is freed; False if the whole head lives on
        elsewhere. A head of the codes alone stays as it is.
        """
        if isinstance(self.head, nn.Sequential) or self.head.out_features == num_codes:
            return
        rows = self.head.weight.detach()[first_code : first_code + num_codes]
        self.head = nn.Linear(self.config.hidden_size, num_codes, bias=False, device="meta")
        self.head.weight = nn.Parameter(rows.clone() if copy else rows, requires_grad=False)

    def forward(self, x: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Features [R, N, D], after the final norm, of embedded nodes x [R, N, D] placed by meta."""
        shape, turn = x.shape, self.turn(meta.positions).flatten(0, 1)
        x = x.flatten(0, 1)  # a matrix: layers take it as it is
        for block, store in zip(self.blocks, cache.layers, strict=True):
            x = block(x, turn, store, meta)
        return self.norm(x).view(shape)

    def causal(self, tokens: Tensor) -> Tensor:
        """Features [R, T, D] after the final norm of whole sequences tokens [R, T]; position = index.

        Right padding cannot reach an earlier token. Equals `forward` over the same tokens up to rounding.
        """
        turn = self.turn(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.causal(x, turn)
        return self.norm(x)
