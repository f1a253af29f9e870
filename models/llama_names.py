"""Published tensor names of Llama-like decoders, in checkpoints of transformers and in LlamaGen's .pt files.

The decoder here stacks tensors that checkpoints store apart (queries, keys and values; gate and up). Rotary
positions rotate pairs of a head's dimensions. transformers pairs j with j + E/2 (half split); LlamaGen pairs
2j with 2j + 1 (interleaved), and so does the decoder here. Rows of queries, keys and their norms are
therefore reordered on load and on export.

Dimensions: H heads, Hkv key/value heads, E head size, D features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.decoder.config import DecoderConfig

# Our name of a tensor -> the published names of its parts, stacked in this order along dimension 0.
Names = dict[str, tuple[str, ...]]

BLOCK: Names = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
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
# GLM-Image: norms after attention and MLP, fused gate and up.
POST_NORM_BLOCK: Names = BLOCK | {
    "after_attention.weight": ("post_self_attn_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",),
    "after_mlp.weight": ("post_mlp_layernorm.weight",),
}
ROTATED = re.compile(r"\.[qk]_(proj|norm)\.")  # names of queries, keys and their norms


def _block_names(config: DecoderConfig, our_prefix: str, published_prefix: str, block: Names) -> Names:
    """Returns the names of one layer, each behind its prefix, without the tensors that the layer lacks."""
    optional = {
        "attention_norm": config.input_norm,
        "attention.qk_": config.qk_norm,
        "attention.qkv.bias": config.qkv_bias,
    }
    absent = tuple(prefix for prefix, present in optional.items() if not present)
    return {
        our_prefix + name: tuple(published_prefix + part for part in parts)
        for name, parts in block.items()
        if not name.startswith(absent)
    }


def layer_names(config: DecoderConfig, prefix: str, block: Names = BLOCK) -> Names:
    """Returns the names of all layers and of the final norm. prefix: what the published names begin with
    ("model.")."""
    names: Names = {"norm.weight": (f"{prefix}norm.weight",)}
    for n in range(config.num_layers):
        names |= _block_names(config, f"blocks.{n}.", f"{prefix}layers.{n}.", block)
    return names


def decoder_names(
    config: DecoderConfig, prefix: str = "model.", head: str = "lm_head.weight", block: Names = BLOCK
) -> Names:
    """Returns the names of a whole decoder in checkpoints of transformers."""
    ends: Names = {"embed.weight": (f"{prefix}embed_tokens.weight",), "head.weight": (head,)}
    return ends | layer_names(config, prefix, block)


def original_names(config: DecoderConfig) -> Names:
    """Returns the names of a whole decoder in LlamaGen's .pt files."""
    ends: Names = {"embed.weight": ("tok_embeddings.weight",), "head.weight": ("output.weight",)}
    return ends | layer_names(config, "", ORIGINAL_BLOCK)


def drafter_names(config: DecoderConfig, bias: bool) -> Names:
    """Returns the names of a drafter's tensors. bias: whether its input projection has one."""
    inputs: Names = {"embed.weight": ("embed_tokens.weight",), "fc.weight": ("fc.weight",)}
    if bias:
        inputs["fc.bias"] = ("fc.bias",)
    return inputs | _block_names(config, "block.", "layers.0.", BLOCK)


def gather(state: Mapping[str, Tensor], names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Returns our state dict from published tensors. KeyError names all tensors that are missing.

    If the tensors are the parameters of a model in memory, these become views of the stacked tensors, so that
    only reordered weights are held twice.
    """
    if absent := [name for parts in names.values() for name in parts if name not in state]:
        raise KeyError(*absent)
    gathered: dict[str, Tensor] = {}
    for ours, published in names.items():
        reordered = {name for name in published if _is_half_split(name, config)}
        if reordered:
            gathered[ours] = torch.cat([_from_published(name, state[name], config) for name in published])
        elif len(published) == 1:
            gathered[ours] = state[published[0]]
        elif isinstance(state, Weights):
            gathered[ours] = state.stacked(published)
        else:
            gathered[ours] = torch.cat([state[name] for name in published])
        if isinstance(state, Weights):
            parts = _unstack(gathered[ours], published, config)
            state.share({name: part for name, part in parts.items() if name not in reordered})
    return gathered


def scatter(state: Mapping[str, Tensor], names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Returns the published tensors of our state dict: the inverse of gather()."""
    scattered: dict[str, Tensor] = {}
    for ours, published in names.items():
        for name, part in _unstack(state[ours], published, config).items():
            scattered[name] = _to_published(name, part, config)
    return scattered


def tied(names: Names, weights: Weights, fields: Mapping[str, Any]) -> Names:
    """Returns the names of a decoder's tensors in a checkpoint. If that has no head, and its config.json,
    `fields`, ties the head to the table of embeddings, the table is the head too."""
    (head,), text = names["head.weight"], fields.get("text_config")
    ties = (part.get("tie_word_embeddings") for part in (fields, text) if isinstance(part, Mapping))
    return names | {"head.weight": names["embed.weight"]} if head not in weights and any(ties) else names


def _reordered(name: str, tensor: Tensor, config: DecoderConfig, sizes: tuple[int, int]) -> Tensor:
    """Returns queries or keys [heads * E, D], or their norms [heads, E], with the first rotary_size rows of
    each head seen as a matrix of these sizes and transposed. For example, the rows 0 1 2 3 4 5 of a head as a
    matrix of 2 x 3 become 0 3 1 4 2 5. Rows that rotary positions do not turn stay where they are."""
    rows = tensor.flatten() if "_norm." in name else tensor
    heads = rows.unflatten(0, (-1, config.head_dim))
    turned, rest = heads.split((config.rotary_size, config.head_dim - config.rotary_size), dim=1)
    turned = turned.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return (torch.cat((turned, rest), dim=1) if rest.shape[1] else turned).view(tensor.shape)


def _is_half_split(name: str, config: DecoderConfig) -> bool:
    """Returns whether the rows of a published tensor are half split: those of queries, keys and their norms
    are, unless the checkpoint is interleaved."""
    return config.half_split and ROTATED.search(name) is not None


def _num_heads(name: str, config: DecoderConfig) -> int:
    """Returns the number of heads whose rows a published tensor holds, or 1 if its rows belong to no head."""
    if ".q_" in name:
        return config.num_heads
    return config.num_kv_heads if ".k_" in name or ".v_" in name else 1


def _unstack(tensor: Tensor, names: Sequence[str], config: DecoderConfig) -> dict[str, Tensor]:
    """Returns the parts of a stacked tensor by their published names, as views of it."""
    heads = [_num_heads(name, config) for name in names]
    rows_per_head = len(tensor) // sum(heads)
    sizes = [rows_per_head * count for count in heads]
    return dict(zip(names, tensor.split(sizes), strict=True))


def _from_published(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Returns one part of a stack in our order. A norm that is stored once for several heads is repeated for
    each."""
    if not _is_half_split(name, config):
        return tensor
    if "_norm." in name:
        tensor = tensor.repeat_interleave(_num_heads(name, config) // len(tensor), dim=0)
    return _reordered(name, tensor, config, (2, config.rotary_size // 2))


def _to_published(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Returns one part of a stack in the order of the checkpoint."""
    if not _is_half_split(name, config):
        return tensor
    return _reordered(name, tensor, config, (config.rotary_size // 2, 2))
