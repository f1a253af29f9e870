"""Preallocated key/value cache: append in place, attend by a tree mask, compact the accepted path in place.

Dimensions: L layers, R rows (images x guidance), C slots, H key/value heads, E head size, N nodes of a
pass, M tree slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one pass of N nodes a row lies in the cache, and what each node may attend to."""

    slots: Tensor  # [R * N, 2 * H] int64: where each node's keys and values go, in the flat view of a layer
    positions: Tensor  # [R, N] int64: rotary position
    mask: Tensor  # [R, 1, N, context_len] additive: 0 where a node may attend, -inf elsewhere
    context_len: int  # slots read: no node attends beyond


class KVCache:
    """Keys and values of every layer, one row an image and guidance branch, each row at its own length.

    Invariant: slots [0, length[r]) of row r hold exactly the committed prefix; the next node's rotary
    position is position[r]. That is length[r], in one tensor, but for families that leave padding out of the
    cache. What lies beyond is scratch of the current tree. Nothing is ever concatenated or reallocated.
    """

    def __init__(self, store: Tensor, length: Tensor, position: Tensor | None = None) -> None:
        """Wrap store [L, R, 2, H, C, E], length [R] int64 (committed slots a row) and position [R] int64
        where it differs from length."""
        self.store, self.length = store, length
        self.position = length if position is None else position
        self._counters = (length,) if position is None else (length, position)
        rows, heads, capacity, size = store.shape[1], 2 * store.shape[3], *store.shape[4:]
        slots = rows * heads * capacity
        # Where each row's keys and values of a head begin, [R, 1, 2 * H].
        self._starts = torch.arange(0, slots, capacity, device=store.device).view(rows, 1, heads)
        self._columns = torch.arange(capacity, device=store.device)
        # Views made once: five a layer and pass cost as much as a product.
        self._flat = store.as_strided((len(store), slots, size), (store.stride(0), size, 1))
        self._layers = [(flat, *held.unbind(1)) for flat, held in zip(self._flat, store, strict=True)]

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        padded: bool = False,
    ) -> KVCache:
        """An empty cache of layers * rows * 2 * heads * capacity * head_dim elements: what attention reads
        of a head lies in one piece. padded: prefixes may leave padding out, so that positions run ahead of
        slots."""
        store = torch.zeros(layers, rows, 2, heads, capacity, head_dim, dtype=dtype, device=device)
        length = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(store, length, torch.zeros_like(length) if padded else None)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.store.shape[4]

    def row(self, index: int) -> KVCache:
        """The one-row cache over the same memory."""
        return type(self)(
            self.store[:, index : index + 1], *(counter[index : index + 1] for counter in self._counters)
        )

    def clear(self, rows: slice = slice(None)) -> None:
        """Forget the prefix of the rows."""
        for counter in self._counters:
            counter[rows] = 0

    def begin(self, count: int, padding: int = 0) -> None:
        """Commit the first `count` slots of an empty cache, but for `padding` leading ones: the others close
        up, and positions go on from count."""
        if padding:
            assert self.position is not self.length, "this cache was not allocated for padding"
            self.store[..., : count - padding, :] = self.store[..., padding:count, :].clone()
            self.position += padding
        for counter in self._counters:
            counter += count - padding

    def metadata(self, depths: Tensor, ancestors: Tensor, max_length: int) -> AttentionMetadata:
        """Place N nodes behind the committed prefix and M - N nodes of earlier passes over the same tree.

        depths [R, N] int64: rotary position relative to the next node's.
        ancestors [R, N, M] bool: node n attends to the whole prefix and to slot length + m where
        ancestors[., n, m]; the nodes themselves are the last N of M. max_length: a bound on length known to
        the host, so that reading it needs no synchronisation. Raises ValueError if the nodes do not fit
        behind max_length committed slots.
        """
        nodes, tree_slots = ancestors.shape[1:]
        context_len = max_length + tree_slots
        if context_len > self.capacity:
            raise ValueError(f"the cache has {self.capacity} slots a row, {context_len} are needed")
        length, columns = self.length[:, None], self._columns
        # SDPA would turn a boolean mask into this additive one in every layer; once a pass is enough.
        mask = torch.zeros(*ancestors.shape[:2], context_len, dtype=self.store.dtype, device=ancestors.device)
        mask.masked_fill_((columns[:context_len] >= length)[:, None], float("-inf"))
        tree_mask = torch.zeros(ancestors.shape, dtype=mask.dtype, device=mask.device)
        tree_mask.masked_fill_(~ancestors, float("-inf"))
        # An idle row, which nobody reads, may be longer than max_length.
        behind = (length + columns[:tree_slots]).clamp(max=context_len - 1)
        mask.scatter_(2, behind[:, None].expand(-1, nodes, -1), tree_mask)
        slots = self._flat_slots(length + columns[tree_slots - nodes : tree_slots])
        return AttentionMetadata(slots, self.position[:, None] + depths, mask[:, None], context_len)

    def write(self, layer: int, meta: AttentionMetadata, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Store kv [R * N, 2, H, E] at the pass's slots; keys and values [R, H, context_len, E] in view."""
        flat, key, value = self._layers[layer]
        flat.index_put_((meta.slots,), kv.flatten(1, 2))
        return key.narrow(2, 0, meta.context_len), value.narrow(2, 0, meta.context_len)

    def attend(self, layer: int, meta: AttentionMetadata, query: Tensor, kv: Tensor) -> Tensor:
        """What the nodes read, [R, N, H, E], of the prefix and of what they may see of the tree.

        query [R, N, H, E]; kv [R * N, 2, Hkv, E], written first: a node sees itself. Computed in the type of
        the cache.
        """
        dtype = self.store.dtype
        key, value = self.write(layer, meta, kv.to(dtype))
        gqa = query.shape[-2] != kv.shape[-2]
        mixed = F.scaled_dot_product_attention(
            query.to(dtype).transpose(1, 2), key, value, attn_mask=meta.mask, enable_gqa=gqa
        )
        return mixed.transpose(1, 2)

    def commit(self, path: Tensor, count: Tensor, leafy_chain: bool = False) -> None:
        """Make the tree nodes path[r, :count[r]] the continuation of row r's prefix, in place.

        path [R, A] int64, strictly increasing along the accepted part, path[r, 0] = 0; entries beyond count
        are ignored by every later pass. count [R] int64. Slots length + path[j] move to length + j. The root
        is there already; of a leafy chain (DraftTree) all but the last accepted node are, and moving that one
        alone is several times cheaper.
        """
        if path.shape[1] > 1:
            place = self._columns[1 : path.shape[1]]
            if leafy_chain:
                place = count[:, None] - 1
                path = path.gather(1, place)
            else:
                path = path[:, 1:]
            length = self.length[:, None]
            moved = self._flat.index_select(1, self._flat_slots(length + path).flatten())
            self._flat.index_copy_(1, self._flat_slots(length + place).flatten(), moved)
        for counter in self._counters:
            counter += count

    def _flat_slots(self, slots: Tensor) -> Tensor:
        """[R * N, 2 * H] int64: slots [R, N] of each row for all its heads, in the flat view of a layer."""
        return (self._starts + slots[..., None]).flatten(0, 1)


class FlashCache(KVCache):
    """A cache that flash-attn reads: for prompts and the AR baseline, whose nodes are a chain.

    flash-attn takes no mask, so draft trees cannot be scored so. fp16 or bf16 on CUDA; not yet run on a GPU.
    """

    def attend(self, layer: int, meta: AttentionMetadata, query: Tensor, kv: Tensor) -> Tensor:
        """As KVCache.attend where every node sees the prefix and all nodes before it."""
        from flash_attn import flash_attn_with_kvcache

        key, value = (x.transpose(1, 2) for x in self.write(layer, meta, kv))
        ends = (self.length + query.shape[1]).to(torch.int32)
        return flash_attn_with_kvcache(query, key, value, cache_seqlens=ends, causal=True)
