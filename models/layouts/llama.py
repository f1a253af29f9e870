"""Llama layers by their two published layouts: LlamaGen's own .pt (queries, keys and values fused) and the
HF-style one (apart). Both keep rotary pairs adjacent, as the decoder here does, so rows are only stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.checkpoint.weights import stacked
from models.transformer import DecoderConfig

# Ours -> theirs, stacked in this order along dimension 0.
Names = Mapping[str, tuple[str, ...]]

HF_BLOCK: Names = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}
HF: Names = {
    "embed.weight": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
ORIGINAL_BLOCK: Names = {
    "attention_norm.weight": ("attention_norm.weight",),
    "attention.qkv.weight": ("attention.wqkv.weight",),
    "attention.out.weight": ("attention.wo.weight",),
    "mlp_norm.weight": ("ffn_norm.weight",),
    "mlp.gate_up.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "mlp.down.weight": ("feed_forward.w2.weight",),
}
ORIGINAL: Names = {
    "embed.weight": ("tok_embeddings.weight",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("output.weight",),
}


def decoder_names(config: DecoderConfig, original: bool) -> dict[str, tuple[str, ...]]:
    """Names of a whole decoder's tensors, in either layout."""
    names = dict(ORIGINAL if original else HF)
    block, start = (ORIGINAL_BLOCK, "layers.") if original else (HF_BLOCK, "model.layers.")
    for layer in range(config.num_layers):
        for ours, theirs in block.items():
            names[f"blocks.{layer}.{ours}"] = tuple(f"{start}{layer}.{name}" for name in theirs)
    return names


def drafter_names(config: DecoderConfig, bias: bool) -> dict[str, tuple[str, ...]]:
    """Names of a LlamaGen drafter's tensors; bias: of its input projection, which is optional."""
    names: dict[str, tuple[str, ...]] = {"embed.weight": ("embed_tokens.weight",)}
    for name in ("fc.weight", "fc.bias")[: 1 + bias]:
        names[name] = (name,)
    for ours, theirs in HF_BLOCK.items():
        if config.input_norm or ours != "attention_norm.weight":
            names[f"block.{ours}"] = tuple(f"layers.0.{name}" for name in theirs)
    return names


def gather(state: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Our tensors from theirs; KeyError names what is missing."""
    return {ours: stacked(state, theirs) for ours, theirs in names.items()}


def scatter(state: Mapping[str, Tensor], names: Names, config: DecoderConfig) -> dict[str, Tensor]:
    """Their tensors from ours: the inverse of gather."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {1: None, 2: [config.intermediate_size] * 2, 3: [query, key, key]}
    found: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        sizes = rows[len(theirs)]
        parts = [state[ours]] if sizes is None else state[ours].split(sizes)
        found.update(zip(theirs, parts, strict=True))
    return found
