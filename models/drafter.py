"""The drafter of EAGLE (arXiv:2401.15077): one decoder layer that continues the target's features.

Its input at position p is fc(cat(embedding of the token at p + 1, feature at p)), its output the predicted
feature at p + 1, from which the target's head predicts the code at p + 2. Published drafters (LANTERN's) have
a separate embedding table, an fc with or without bias, and no final norm.

Dimensions: G guidance branches, B slots, R = G * B rows, N entries of a pass, T entries of a sequence, A path
entries, W nodes of a level, E nodes that a tree can expand, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adt_tree.errors import CheckpointError
from adt_tree.roles import Prefix
from models.cell_tokens import CellTokens
from models.checkpoint.config import read_config
from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module
from models.checkpoint.weights import read_weights
from models.decoder.cache import AttentionMetadata, KVCache, aligned
from models.decoder.config import DecoderConfig, read_shape
from models.decoder.packed import cache_dtype
from models.decoder.transformer import Block, Positioned, attend_causally
from models.llama_names import drafter_names, gather
from models.target import ARTarget, EncodedPrompt, by_branch, chain_mask


class DrafterNet(Positioned):
    """The network of a drafter. `forward` is for decoding, `causal` for training."""

    def __init__(self, config: DecoderConfig, bias: bool = True) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.block = Block(config)

    def fuse(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Returns the layer's input [..., N, D] of features [..., N, D] and tokens [B, N]."""
        return self.fc(torch.cat((self.embed(tokens).expand_as(features), features), dim=-1))

    def forward(
        self, tokens: Tensor, features: Tensor, cache: KVCache, meta: AttentionMetadata, rotation: Tensor
    ) -> Tensor:
        """Returns the predicted features [G, B, N, D] of pairs that meta places in the cache: tokens [B, N]
        and features [G, B, N, D]. rotation: rotations(meta.positions)."""
        x = self.fuse(tokens, features).flatten(0, 1)
        query, kv = (part.flatten(0, 1) for part in self.block.project(x, rotation))
        return self.block.merge(x.flatten(0, 1), meta.attend(cache.layers[0], query, kv)).view_as(features)

    def causal(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Returns the predicted features [R, T, D] of whole sequences, without a cache: output p predicts the
        feature at p + 1 from the pairs (feature, next token) up to p."""
        rotation = self.rotations(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.fuse(tokens, features)
        return self.block.merge(x, attend_causally(*self.block.project(x, rotation)))


def drafter_fields(shape: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json of a drafter whose layer has this shape, the target's."""
    return {
        "model_type": "chameleon", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions, "bias": True,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrafterLayout:
    """The form of config.json in which a family's drafters are published."""

    config: Callable[[Mapping[str, Any]], DecoderConfig]  # fields of config.json -> shape
    fields: Callable[[DecoderConfig], dict[str, Any]] = drafter_fields  # the target's shape -> fields


LLAMA = DrafterLayout(
    partial(read_shape, norm_eps=1e-6), lambda shape: drafter_fields(shape) | {"model_type": "llama"}
)


def shape_conflict(drafter: DecoderConfig, target: DecoderConfig) -> str | None:
    """Returns the reason why a drafter of this shape cannot belong to the target; None if it can."""
    for name in ("hidden_size", "vocab_size"):
        size, target_size = getattr(drafter, name), getattr(target, name)
        if size != target_size:
            return f"{name} {size}, the target has {target_size}"
    return None


def load_drafter(
    folder: Path,
    target: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: DrafterLayout,
) -> tuple[DrafterNet, str]:
    """Returns the network in a folder and the digest of its weights. Raises CheckpointError if its files are
    damaged or it belongs to another target."""
    config, state = read_config(folder), read_weights(folder)
    with reading(folder / "config.json"):
        shape = layout.config(config)
    if conflict := shape_conflict(shape, target):
        raise CheckpointError(f"{folder}: {conflict}: this drafter belongs to another target")
    bias, placed = "fc.bias" in state, state.placed(device, dtype)
    names = drafter_names(shape, bias)
    to_ours = partial(gather, names=names, config=shape)
    remedy = "fetch it again, or give the drafter of this model"
    net = load_module(lambda: DrafterNet(shape, bias), placed, folder, to_ours, remedy)
    return net, placed.digest()


def step_entries(max_depth: int, max_width: int) -> int:
    """Returns a bound on the entries that one step places after the prefix of a row: those of a tree, or the
    pairs of an accepted path."""
    return max(max_depth + 1, max_depth * max_width)


class EagleDrafter:
    """The Drafter made of a network and a cache with a row for every row of the target.

    Under guidance both branches run with the same codes, each on the features of that branch. Entry p of the
    cache is the pair (feature at p, token at p + 1). A row is one entry shorter than the target's until
    extend() pairs the last feature with its code.
    """

    def __init__(
        self,
        net: DrafterNet,
        target: ARTarget,
        max_depth: int,
        max_width: int,
    ) -> None:
        """max_depth, max_width: depth and width of the largest tree."""
        self.net, self.target = net, target
        self.device = target.device
        self._longest = 0  # bound on the entries of any row after the last extend()
        config = net.config
        capacity = aligned(target.max_prompt + target.grid.length + step_entries(max_depth, max_width))
        net.reserve(capacity)
        rows, dtype = target.branches * target.slots, cache_dtype(net.embed.weight)
        one_layer, few = replace(config, num_layers=1), target.padding.few
        self.cache = KVCache.allocate(one_layer, rows, capacity, dtype, self.device, few_shapes=few)
        self._cells = CellTokens(target.grid, target.ids, target.slots, self.device)

    def prefill(self, slot: int, prompt: EncodedPrompt, prefix: Prefix) -> None:
        for branch, features in enumerate(prefix.features):
            tokens = prompt.tokens(branch)[1:]
            if not branch:
                self._cells.begin(slot, len(tokens))
            cache = self.cache.row(branch * self.target.slots + slot)
            cache.clear()
            if tokens:
                order = torch.arange(len(tokens), device=self.device)[None]
                meta = cache.metadata(order, chain_mask(len(tokens), self.device), [0])
                ids, rotation = torch.tensor([tokens], device=self.device), self.net.rotations(meta.positions)
                self.net(ids, features[None, None, :-1], cache, meta, rotation)
                cache.begin(len(tokens))

    def release(self, slot: int) -> None:
        self.cache.erase(slice(slot, None, self.target.slots))

    def extend(self, features: Tensor, codes: Tensor, count: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        # After extend() a row has as many entries as the target's row has tokens.
        self._longest = longest + max(self.target.prompts)
        branches, images, pairs, size = features.shape
        order, rows = torch.arange(pairs, device=self.device), branches * images
        tokens = self._cells.ids(codes, self.cache.length, order)
        ancestors = chain_mask(pairs, self.device).expand(rows, -1, -1)
        meta = self.cache.metadata(order.expand(rows, -1), ancestors, [self._longest])
        hidden = self.net(tokens, features, self.cache, meta, self.net.rotations(meta.positions))
        self.cache.length += by_branch(count, branches)
        last = (count - 1)[None, :, None, None].expand(branches, -1, 1, size)
        feature = hidden.gather(2, last)[:, :, 0]
        return self.target.logits(feature), feature

    def places(self, depths: Tensor, widths: Sequence[int]) -> list[tuple[Tensor, ...]]:
        positions, entries, mask = self.cache.scratch(depths, self._longest)
        prefix = mask.unflatten(0, (self.target.branches, -1))
        whole_tree = depths[None], positions, entries, self.net.rotations(positions)
        by_level = zip(*(x.split(list(widths), dim=1) for x in whole_tree), strict=True)
        return [(*of_level, prefix) for of_level in by_level]

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, place: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        depths, positions, entries, rotation, prefix = place
        tokens = self._cells.ids(codes, self.cache.length, depths)
        tree = ancestors.to(prefix.dtype).log().expand(len(features), -1, -1, -1)  # 0 or -inf
        mask = torch.cat((prefix.expand(-1, -1, codes.shape[1], -1), tree), dim=-1).flatten(0, 1)
        if self.cache.head_groups > 1:
            mask = mask.repeat(1, self.cache.head_groups, 1)
        mask, every = mask[:, None], slice(None)
        calls = [(every, every, mask)]
        meta = AttentionMetadata(entries, positions, calls, self.cache.kernel)
        hidden = self.net(tokens, features, self.cache, meta, rotation)
        return self.target.logits(hidden), hidden
