"""The EAGLE drafter: one decoder layer over fc(cat(embedding of code p + 1, feature at p)), read by the
target's head.

Facts of the published layout (LANTERN): own embedding table, fc with or without bias, no final norm.
Dimensions: G guidance branches, B slots, R = G * B rows, A path slots, W nodes, E nodes expanded so far, D
features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adt_tree.errors import CheckpointError
from adt_tree.ranges import part
from adt_tree.roles import Prefix
from models.alignment import pairing
from models.cache import AttentionMetadata, KVCache
from models.checkpoint.config import read_config
from models.checkpoint.files import reading
from models.checkpoint.meta_init import build, expected, require
from models.checkpoint.weights import read_weights
from models.layouts.llama import drafter_names, gather, scatter
from models.packed import cache_dtype, pack
from models.target import ARTarget, EncodedPrompt, by_branch, chain_mask
from models.transformer import Block, DecoderConfig, Positioned, attend_causally, read_shape


class DrafterNet(Positioned):
    """The drafter's network. `causal` serves training, `forward` decoding."""

    def __init__(self, config: DecoderConfig, bias: bool = True) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.block = Block(config)

    def fuse(self, tokens: Tensor, features: Tensor) -> Tensor:
        """fc(cat(embedding, feature)): tokens [R, N], features [R, N, D]; the embedding comes first."""
        return self.fc(torch.cat((self.embed(tokens), features), dim=-1))

    def forward(self, tokens: Tensor, features: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Predicted features [R, N, D] of pairs placed in the cache by meta."""
        x = self.fuse(tokens, features).flatten(0, 1)
        query, kv = self.block.project(x, self.rotations(meta.positions).flatten(0, 1))
        return self.block.merge(x, meta.attend(cache.layers[0], query, kv)).view_as(features)

    def causal(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Predicted features [R, T, D]: at p from (feature at p, token at p + 1) and all before."""
        rotation = self.rotations(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.fuse(tokens, features)
        return self.block.merge(x, attend_causally(*self.block.project(x, rotation)))


def drafter_fields(shape: DecoderConfig) -> dict[str, Any]:
    """config.json of a drafter whose layer has the target's shape."""
    return {
        "model_type": "chameleon", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions, "bias": True,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family publishes its drafters' config.json."""

    config: Callable[[Mapping[str, Any]], DecoderConfig] = read_shape  # with one layer
    fields: Callable[[DecoderConfig], dict[str, Any]] = drafter_fields  # of a new one


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """A drafter's config.json whose layer has no norms of queries and keys."""
    return replace(read_shape(config, norm_eps=1e-6), qk_norm=False)


CHAMELEON = Layout()
LLAMA = Layout(config=llama_config, fields=lambda shape: drafter_fields(shape) | {"model_type": "llama"})


def misfit(shape: DecoderConfig, target: DecoderConfig) -> str | None:
    """What sets a drafter's shape apart from those that its target can have; None: nothing."""
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(shape, name), getattr(target, name)
        if own != wanted:
            return f"{name} {own}, the target has {wanted}"
    return None


def load_drafter(
    folder: Path,
    target: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout,
) -> tuple[DrafterNet, str]:
    """The network in a folder and the digest of its weights. CheckpointError if it is another target's."""
    config, state = read_config(folder), read_weights(folder)
    with reading(folder / "config.json"):
        shape = layout.config(config)
    if other := misfit(shape, target):
        raise CheckpointError(f"{folder}: {other}: this drafter belongs to another target")
    bias, placed = "fc.bias" in state, state.placed(device, dtype)
    names = drafter_names(shape, bias)
    wanted = expected(lambda: DrafterNet(shape, bias), lambda own: scatter(own, names, shape))
    require(folder, state, wanted, "fetch it again, or give the drafter of this model")
    net = build(lambda: DrafterNet(shape, bias), placed, folder, lambda own: gather(own, names, shape))
    return net, placed.digest()


class EagleDrafter:
    """The Drafter of a network: with its own preallocated cache, beside one target's slots.

    Guidance lives inside: both branches run, each on its own features, with the same codes. Entry p of the
    cache is the pair (feature at p, token at p + 1), or as `alignment` has it: a row is one entry shorter
    than the target's until extend() pairs the last feature.
    """

    def __init__(
        self,
        net: DrafterNet,
        target: ARTarget,
        max_depth: int,
        max_width: int,
        alignment: str = "published",
    ) -> None:
        """max_depth, max_width: of the largest tree. alignment: one of models.spec.ALIGNMENTS."""
        self.net, self.target = net, target
        self.device = target.device
        self._most_committed = 0  # bound on the codes in any slot's prefix at the last extend()
        self.alignment = pairing(alignment, target)
        config = net.config
        scratch = max(max_depth + 1, max_depth * max_width)
        capacity = target.max_prompt + target.grid.size + scratch
        net.reserve(capacity)
        pack(net)
        rows, dtype = target.branches * target.slots, cache_dtype(net.embed.weight)
        self.cache = KVCache.allocate(replace(config, num_layers=1), rows, capacity, dtype, self.device)

    def prefill(self, slot: int, prompt: EncodedPrompt, prefix: Prefix) -> None:
        """Take in the prompt: every feature but the last pairs with the token behind it."""
        for branch, features in enumerate(prefix.features):
            tokens = self.alignment.prompt(slot, prompt.tokens(branch))
            cache = self.cache.row(branch * self.target.slots + slot)
            cache.clear()
            if tokens:
                order = torch.arange(len(tokens), device=self.device)[None]
                meta = cache.metadata(order, chain_mask(len(tokens), self.device), max_length=0)
                self.net(torch.tensor([tokens], device=self.device), features[None, :-1], cache, meta)
                cache.begin(len(tokens))

    def release(self, slot: int) -> None:
        """Forget an idle slot's entries."""
        self.cache.clear(slice(slot, None, self.target.slots))

    def context(self, committed: Sequence[int]) -> int:
        """A bound on the codes in any slot's prefix. Where few shapes are fast it is the whole image: what
        one layer reads of it is little beside its weights."""
        return self.target.grid.size if self.target.few_shapes else max(committed)

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Commit pairs, as a chain behind those before; logits and feature at the last valid one."""
        self._most_committed = context
        branches, images, pairs, size = features.shape
        order = torch.arange(pairs, device=self.device).expand(images, -1)
        ancestors = chain_mask(pairs, self.device).expand(images, -1, -1)
        tokens = self.alignment.committed(codes, count)
        with part("drafter"):
            hidden = self.run(tokens, features, order, ancestors, self._most_committed)
            self.cache.length += by_branch(count, branches)
            last = (count - 1)[None, :, None, None].expand(branches, -1, 1, size)
            feature = hidden.gather(2, last)[:, :, 0]
            return self.target.logits(feature), feature

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Logits and features of a level of tree nodes, `depth` levels below the root's children."""
        return self.expand_at(codes, features, ancestors, torch.full_like(codes, depth))

    def expand_at(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """expand() with a depth [B, W] for every node."""
        tokens = self.alignment.drafted(codes, ancestors)
        with part("drafter"):
            hidden = self.run(tokens, features, depths, ancestors, self._most_committed)
            return self.target.logits(hidden), hidden

    def run(
        self, codes: Tensor, features: Tensor, depths: Tensor, ancestors: Tensor, most_committed: int
    ) -> Tensor:
        """The network's features [G, B, W, D] of pairs: codes and depths [B, W], features [G, B, W, D],
        ancestors [B, W, E]. As a target's pass, it writes nothing else but scratch."""
        depths, ancestors, tokens = (
            by_branch(x, features.shape[0]) for x in (depths, ancestors, codes + self.target.first_code)
        )
        # After extend() a row is as long as the target's.
        meta = self.cache.metadata(depths, ancestors, most_committed + self.target.max_prompt)
        hidden = self.net(tokens, features.flatten(0, 1), self.cache, meta)
        return hidden.unflatten(0, features.shape[:2])
