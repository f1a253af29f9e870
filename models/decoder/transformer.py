"""The decoder of every autoregressive image model of this project. DecoderConfig says how models differ.

It has RMSNorm, a gated MLP, an optional LayerNorm per head on queries and keys, and rotary positions in
fp32. The rotary pairs of a head are adjacent, (2j, 2j + 1); models.llama_names reorders the rows of
checkpoints with other pairs on load.

Dimensions: R rows, N nodes, T tokens, S tokens that are attended to, D features, H query heads, Hkv key/value
heads, E head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.decoder.cache import AttentionMetadata, KVCache
from models.decoder.config import DecoderConfig

AXES = 3  # of rotary positions with rope_sections: time, row, column
MAX_TABULATED = 1 << 14  # positions whose rotations are tabulated before reserve() asks for more
MAX_COMPILED = 256  # one process compiles a function for at most this many layouts of its tensors
QK_NORM_EPS = 1e-5  # fixed in the published Chameleon code, not in its configuration


def rotary_table(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor:
    """Returns the rotations of all positions, [max_positions, E/2, 2, 2] fp32: pair j of a head at position
    n, (a, b), becomes (a, b) @ table[n, j], which turns it by the angle n * theta^(-2j/E).

    Over a raster (LlamaGen) the first half of the pairs turns by the row of a code, the second by its column.
    The table is zero before and after the raster. Queries and keys become zero there, so that all scores of
    a text prefix are equal, whatever its order.

    With rope_sections, n is the position on the pair's axis, and E in the angle is rotary_size. The entries
    of pairs that are not rotated are identities.
    """
    side, start = config.raster_side, config.raster_start
    if not side:
        table = _rotations(config.max_positions, config.rotary_size, config.rope_theta, device)
        identity = torch.eye(2, dtype=torch.float32, device=device)
        unturned = identity.expand(len(table), config.head_dim // 2 - table.shape[1], 2, 2)
        return torch.cat((table, unturned), dim=1) if unturned.numel() else table
    line = _rotations(side, config.head_dim // 2, config.rope_theta, device)
    rows, columns = line[:, None].expand(-1, side, -1, -1, -1), line[None].expand(side, -1, -1, -1, -1)
    table = line.new_zeros(config.max_positions, config.head_dim // 2, 2, 2)
    table[start : start + side * side] = torch.cat((rows, columns), dim=2).flatten(0, 1)
    return table


def _rotations(count: int, size: int, theta: float, device: torch.device | str) -> Tensor:
    """Returns the matrices [[cos, sin], [-sin, cos]] of the angles n * theta^(-2j/size) for all n < count:
    [count, size/2, 2, 2]."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    # All published implementations round the frequencies to fp32.
    frequency = (1.0 / theta**exponent).float()
    angles = torch.arange(count, device=device).float()[:, None] * frequency
    cos, sin = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).unbind(-1)
    return torch.stack((cos, sin, -sin, cos), dim=-1).unflatten(-1, (2, 2))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates the pairs of x [..., H, E] by rotation [..., 1, E/2, 2, 2] in fp32. Returns the dtype of x. The
    arithmetic is real, because torch.compile generates no code for complex numbers."""
    first, second = x.unflatten(-1, (-1, 2)).split(1, dim=-1)
    above, below = rotation.unbind(-2)
    return torch.addcmul(second * below, first, above).flatten(-2).type_as(x)


def split_heads(
    fused: Tensor, rotation: Tensor, heads: int, kv_heads: int, affine: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Splits a fused projection [..., (H + 2 Hkv) E]. Returns the queries [..., H, E], and the keys followed
    by the values [..., 2 * Hkv, E].

    Queries and keys are rotated. Before that they are normed, if `affine` gives a scale and a shift [H + Hkv,
    E].
    """
    fused = fused.view(*fused.shape[:-1], heads + 2 * kv_heads, -1)
    count = heads + kv_heads
    qk, value = fused.narrow(-2, 0, count), fused.narrow(-2, count, kv_heads)
    if affine is not None:
        # Values are normed with the rest, and the result is not used: a norm of queries and keys alone would
        # have to copy them first.
        normed = F.layer_norm(fused, fused.shape[-1:], eps=QK_NORM_EPS).narrow(-2, 0, count)
        qk = torch.addcmul(affine[1], normed, affine[0])
    qk = rotate(qk, rotation)
    return qk.narrow(-2, 0, heads), torch.cat((qk.narrow(-2, heads, kv_heads), value), dim=-2)


def attend_causally(query: Tensor, kv: Tensor) -> Tensor:
    """Returns attention [R, T, H * E] of every token to itself and all tokens before it, without a cache,
    from query [R, T, H, E] and kv [R, T, 2 * Hkv, E]."""
    return attend_densely(query, kv, is_causal=True)


def attend_densely(query: Tensor, kv: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Returns attention [R, T, H * E] of T tokens to S tokens, from query [R, T, H, E] and kv [R, S, 2 * Hkv,
    E]. mask [T, S] bool: the tokens that each token may attend to."""
    # CUDA's memory-efficient kernel takes no keys and values that several query heads share.
    if 2 * query.shape[2] > kv.shape[2]:
        kv = kv.repeat_interleave(2 * query.shape[2] // kv.shape[2], dim=2)
    key, value = kv.transpose(1, 2).chunk(2, dim=1)
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, is_causal=is_causal)
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """The weights of multi-head attention: one fused projection for queries, keys and values, and the output
    projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            shape = (self.heads + self.kv_heads, self.head_dim)
            self.qk_weight = nn.Parameter(torch.ones(shape))
            self.qk_bias = nn.Parameter(torch.zeros(shape))

    @property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        """The scale and the shift of the norm of queries and keys; None without that norm."""
        return (self.qk_weight, self.qk_bias) if self.qk_norm else None

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the queries, and the keys followed by the values, of x [..., D]."""
        return split_heads(self.qkv(x), rotation, self.heads, self.kv_heads, self.affine)


class Fp32ScaledNorm(nn.RMSNorm):
    """An RMSNorm whose scale is fp32, whatever the type of the features, and stays fp32 in a cast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps).type_as(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp32ScaledNorm:
        return super()._apply(lambda x: fn(x).float(), recurse)


def make_norm(config: DecoderConfig) -> nn.RMSNorm:
    """Returns a norm of features."""
    kind = Fp32ScaledNorm if config.fp32_scales else nn.RMSNorm
    return kind(config.hidden_size, config.norm_eps)


class MLP(nn.Module):
    """SwiGLU, or GeGLU in the tanh form, with fused gate and up projections."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns down(activation(gate(x)) * up(x)); x [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up)


class Block(nn.Module):
    """One pre-norm decoder layer: project, attend, merge."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm: nn.Module = make_norm(config) if config.input_norm else nn.Identity()
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.after_attention, self.after_mlp = (
            make_norm(config) if config.post_norms else nn.Identity() for _ in range(2)
        )

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries [..., H, E], and keys followed by values [..., 2 * Hkv, E], of the layer's input x
        [..., D]. rotation [..., 1, E/2, 2, 2]."""
        return self.attention.project(self.attention_norm(x), rotation)

    def merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Returns the layer's output from its input x [..., D] and the result of attention, mixed [..., H *
        E]."""
        x = x + self.after_attention(self.attention.out(mixed.to(x.dtype)))  # a CPU attends in fp32
        return x + self.after_mlp(self.mlp(self.mlp_norm(x)))


def join(block: Block, after: Block, x: Tensor, mixed: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
    """Computes everything between the attention of one layer and that of the next. Returns the output x of
    `block`, and the queries, keys and values of the layer `after` it."""
    x = block.merge(x, mixed)
    return x, *after.project(x, rotation)


Join = Callable[..., tuple[Tensor, ...]]  # the signature of join()


def as_it_is(function: Any) -> Any:
    """Returns the function. It takes the place of compiled()."""
    return function


@cache
def compiled(function: Any) -> Any:
    """Returns a function of tensors compiled by torch.compile, for CUDA: join() takes about 10 kernels
    instead of 16 to 18. It is compiled once for every layout of the tensors: join() for all layers together,
    expand_level() for all levels."""
    compile_: Any = torch.compile  # Any, because its type does not declare recompile_limit
    return compile_(function, fullgraph=True, dynamic=False, recompile_limit=MAX_COMPILED)


def make_head(config: DecoderConfig) -> nn.Linear | nn.Sequential:
    """Returns the head: a matrix for the vocabulary or its first ids, or two layers with GELU between them
    for the codes alone (Janus' generation_head)."""
    if not config.head_width:
        return nn.Linear(config.hidden_size, config.head_rows or config.vocab_size, bias=False)
    first = nn.Linear(config.hidden_size, config.head_width)
    second = nn.Linear(config.head_width, config.num_codes)
    return nn.Sequential(OrderedDict(proj_out=first, gelu=nn.GELU(), vision_head=second))


def logits_of(head: nn.Module, features: Tensor) -> Tensor:
    """Returns the head's logits [..., V] of features [..., D] in fp32.

    On CUDA a matrix of 16 bits leaves its sums unrounded. Guidance would amplify the rounding, and codes that
    are nearly equally probable would change places with the number of rows of the pass.
    """
    if isinstance(head, nn.Linear) and head.weight.is_cuda and head.weight.dtype != torch.float32:
        rows = features.flatten(0, -2)
        product = torch.mm(rows, head.weight.t(), out_dtype=torch.float32)
        return product.unflatten(0, features.shape[:-1])
    return head(features).float()


class Positioned(nn.Module):
    """A token embedding and rotary positions: the common part of a decoder and its drafter."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        # The table is not a buffer, so it is a real tensor even if the module is built on the meta device,
        # and a cast of the module leaves it in fp32 (a bf16 table is off by 0.6 rad at position 500).
        self.rotary = rotary_table(replace(config, max_positions=min(config.max_positions, MAX_TABULATED)))
        self._outgrown: list[Tensor] = []  # tables that CUDA graphs of earlier targets still read
        # With positions on three axes: the axis to which each pair of a head belongs.
        pairs = config.head_dim // 2
        axis = [n % AXES for n, size in enumerate(config.rope_sections) for _ in range(size)]
        self._axis = torch.tensor(axis + [0] * (pairs - len(axis)), device="cpu")
        self._pair = torch.arange(pairs, device="cpu")

    def reserve(self, positions: int) -> None:
        """Makes the rotary table longer if it has fewer positions than `positions`."""
        if positions > len(self.rotary):
            self._outgrown.append(self.rotary)
            longer = replace(self.config, max_positions=positions)
            self.rotary = rotary_table(longer, self.rotary.device)

    def rotations(self, positions: Tensor) -> Tensor:
        """Returns the rotations [R, N, 1, E/2, 2, 2] of positions [R, N], or [R, N, 3] on three axes."""
        if self.rotary.device != positions.device:
            self.rotary, self._axis, self._pair = (
                x.to(positions.device) for x in (self.rotary, self._axis, self._pair)
            )
        if not self.config.rope_sections:
            return self.rotary[positions].unsqueeze(2)
        by_axis = positions[..., self._axis] if positions.dim() == 3 else positions[..., None]
        return self.rotary[by_axis, self._pair].unsqueeze(2)


class Decoder(Positioned):
    """Embedding, blocks, norm and head. `forward` is for decoding, `causal` for training and scoring."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = make_head(config)

    def cut_head(self, first_code: int, num_codes: int, copy: bool = True) -> None:
        """Cuts the head to the rows that score the codes, because no other logit is ever used. A head for the
        codes alone stays as it is.

        copy: copies the rows, so that the memory of the whole head is freed. False if others use the whole
        head as well.
        """
        if isinstance(self.head, nn.Sequential) or self.head.out_features == num_codes:
            return
        rows = self.head.weight.detach()[first_code : first_code + num_codes]
        self.head = nn.Linear(self.config.hidden_size, num_codes, bias=False, device="meta")
        self.head.weight = nn.Parameter(rows.clone() if copy else rows, requires_grad=False)

    def forward(self, x: Tensor, cache: KVCache, meta: AttentionMetadata, join: Join = join) -> Tensor:
        """Returns the features [R, N, D], after the final norm, of embedded nodes x [R, N, D] placed by meta.
        join: join(), or its compiled form."""
        shape, rotation = x.shape, self.rotations(meta.positions).flatten(0, 1)
        x = x.flatten(0, 1)  # [R * N, D]: layers work on a matrix
        *stores, last_store = cache.layers
        query, kv = self.blocks[0].project(x, rotation)
        for (block, after), store in zip(pairwise(self.blocks), stores, strict=True):
            x, query, kv = join(block, after, x, meta.attend(store, query, kv), rotation)
        return self.norm(self.blocks[-1].merge(x, meta.attend(last_store, query, kv))).view(shape)

    def causal(self, tokens: Tensor) -> Tensor:
        """Returns the features [R, T, D], after the final norm, of whole sequences of tokens [R, T] at
        positions 0 to T - 1. They equal those of `forward` up to rounding. Padding on the right does not
        change the features of the tokens before it."""
        rotation = self.rotations(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.merge(x, attend_causally(*block.project(x, rotation)))
        return self.norm(x)
