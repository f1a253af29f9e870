"""Published names of a Llama-like decoder's tensors: transformers' and those of LlamaGen's own .pt.

What is fused here lies apart there and is stacked. transformers' rotary positions turn dimension j of a head
with j + E/2 (half split); LlamaGen keeps pairs adjacent, and so does the decoder here: rows of queries, keys
and their norms are permuted on load and on export.

Dimensions: H heads, Hkv key/value heads, E head size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.transformer import DecoderConfig

# Ours -> theirs, stacked in this order along dimension 0.
Names = dict[str, tuple[str, ...]]

BLOCK: Names = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qk_weight": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "attention.qk_bias": ("self_attn.q_norm.bias", "self_attn.k_norm.bias"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}
ORIGINAL_BLOCK: Names = {
    "attention_norm.weight": ("attention_norm.weight",),
    "attention.qkv.weight": ("attention.wqkv.weight",),
    "attention.out.weight": ("attention.wo.weight",),
    "mlp_norm.weight": ("ffn_norm.weight",),
    "mlp.gate_up.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "mlp.down.weight": ("feed_forward.w2.weight",),
}
TURNED = re.compile(r"\.[qk]_(proj|norm)\.")  # of a half-split layout, in another order here


def _block_names(config: DecoderConfig, ours: str, theirs: str, block: Names) -> Names:
    """The names of one layer, which follow these prefixes."""
    there = {"attention_norm": config.input_norm, "attention.qk_": config.qk_norm}
    absent = tuple(start for start, present in there.items() if not present)
    return {
        ours + name: tuple(theirs + part for part in parts)
        for name, parts in block.items()
        if not name.startswith(absent)
    }


def layer_names(config: DecoderConfig, prefix: str, block: Names = BLOCK) -> Names:
    """Names of the final norm and of all layers; theirs follow the prefix ("model.")."""
    names: Names = {"norm.weight": (f"{prefix}norm.weight",)}
    for n in range(config.num_layers):
        names |= _block_names(config, f"blocks.{n}.", f"{prefix}layers.{n}.", block)
    return names


def decoder_names(config: DecoderConfig, prefix: str = "model.", head: str = "lm_head.weight") -> Names:
    """Names of a whole decoder as transformers' classes have them."""
    table: Names = {"embed.weight": (f"{prefix}embed_tokens.weight",), "head.weight": (head,)}
    return table | layer_names(config, prefix)


def original_names(config: DecoderConfig) -> Names:
    """Names of a whole decoder as LlamaGen's own .pt has them."""
    table: Names = {"embed.weight": ("tok_embeddings.weight",), "head.weight": ("output.weight",)}
    return table | layer_names(config, "", ORIGINAL_BLOCK)


def drafter_names(config: DecoderConfig, bias: bool) -> Names:
    """Names of a drafter's tensors; bias: of its input projection, which is optional."""
    own: Names = {"embed.weight": ("embed_tokens.weight",), "fc.weight": ("fc.weight",)}
    if bias:
        own["fc.bias"] = ("fc.bias",)
    return own | _block_names(config, "block.", "layers.0.", BLOCK)


def gather(state: Mapping[str, Tensor], names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Our tensors from theirs; KeyError names what is missing.

    Parameters of a model in memory become views of what they are stacked in, unless their order is another.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        turned = [name for name in theirs if _is_turned(name, config)]
        if turned:
            found[ours] = torch.cat([_interleaved(name, state[name], config) for name in theirs])
        elif len(theirs) == 1:
            found[ours] = state[theirs[0]]
        elif isinstance(state, Weights):
            found[ours] = state.stacked(theirs)
        else:
            found[ours] = torch.cat([state[name] for name in theirs])
        if isinstance(state, Weights):
            parts = _apart(found[ours], theirs, config)
            state.share({name: part for name, part in parts.items() if name not in turned})
    return found


def scatter(state: Mapping[str, Tensor], names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Their tensors from ours: the inverse of gather."""
    found: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        for name, part in _apart(state[ours], theirs, config).items():
            found[name] = _regrouped(name, part, config, config.head_dim // 2)
    return found


def _is_turned(name: str, config: DecoderConfig) -> bool:
    """Whether a published tensor is half split: all queries and keys are, but LlamaGen's, over a raster."""
    return config.raster_side == 0 and TURNED.search(name) is not None


def _heads(name: str, config: DecoderConfig) -> int:
    """Heads that a published tensor belongs to; 1: to none."""
    if ".q_" in name:
        return config.num_heads
    return config.num_kv_heads if ".k_" in name or ".v_" in name else 1


def _apart(tensor: Tensor, theirs: Sequence[str], config: DecoderConfig) -> dict[str, Tensor]:
    """The parts of a stacked tensor by their names, views of it."""
    shares = [_heads(name, config) for name in theirs]
    row = len(tensor) // sum(shares)
    return dict(zip(theirs, tensor.split([row * share for share in shares]), strict=True))


def _interleaved(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """A published part in our order; norms may be stored once for several heads."""
    if "_norm." in name:
        tensor = tensor.repeat_interleave(_heads(name, config) // len(tensor), dim=0)
    return _regrouped(name, tensor, config, 2)


def _regrouped(name: str, tensor: Tensor, config: DecoderConfig, groups: int) -> Tensor:
    """Queries or keys [heads * E, D], or their norms [heads, E], the groups of each head's rows interleaved:
    2 turn halves into adjacent pairs, E/2 pairs into halves. Others as they are."""
    if not _is_turned(name, config):
        return tensor
    columns = 1 if "_norm." in name else tensor.shape[1]
    heads = tensor.reshape(-1, groups, config.head_dim // groups, columns)
    return heads.transpose(1, 2).reshape(tensor.shape)
