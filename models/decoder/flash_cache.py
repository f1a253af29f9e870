"""Attention by the package flash-attn, over the cache of models.decoder.cache (option attention flash)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from models.decoder.cache import AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True)
class ChainMetadata(AttentionMetadata):
    """Metadata of a pass whose nodes are a chain, for flash-attn, which takes no mask."""

    ends: Tensor = field(kw_only=True)  # [R] int32: number of entries of each row, with those of this pass

    def attend(self, store: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        self.write(store, kv)
        key, value = (x.transpose(1, 2) for x in self.read(store))
        query = query.unflatten(0, self.positions.shape[:2])
        mixed = flash_attn_with_kvcache(query, key, value, cache_seqlens=self.ends, causal=True)
        return mixed.flatten(0, 1).flatten(1)


class FlashCache(KVCache):
    """A cache that flash-attn reads, for prompts and the AR baseline, whose nodes are a chain. It needs fp16
    or bf16 on CUDA, and has not been run on a GPU yet."""

    may_skip_rows = False

    def metadata(self, depths: Tensor, ancestors: Tensor, lengths: Sequence[int | None]) -> ChainMetadata:
        plain = super().metadata(depths, ancestors, lengths)
        ends = (self.length + ancestors.shape[1]).to(torch.int32)
        return ChainMetadata(*(getattr(plain, part.name) for part in fields(plain)), ends=ends)
