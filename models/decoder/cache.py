"""Preallocated key/value cache: append in place, attend by a tree mask, compact the accepted path in place.

Dimensions: L layers, R rows (images x guidance branches), C entries of a row, H query heads, Hkv key/value
heads, G = H / Hkv, E head size, N nodes of a pass, M nodes of a tree so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.tree import to_device
from models.decoder.attention import Attend, choose_kernel, sdpa
from models.decoder.config import DecoderConfig
from models.decoder.positions import AxisPositions

ALIGNMENT = 8  # CUDA's fused attention needs head sizes and mask strides that are multiples of this
# On a CPU a call of attention for every image pays if images are on average more than so many entries shorter
# than the longest: reading as many entries of each as the longest has would take longer (docs/LOG.md).
UNUSED = 64


def aligned(size: int) -> int:
    """Returns the smallest multiple of ALIGNMENT that is not less than size."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of a pass's N nodes in the cache, and the entries that each node may attend to.

    The G query heads that share a key/value head are further query rows over the same keys, so that grouped
    heads take the same fused kernel as ungrouped ones. Query row g * N + n is node n in head g of its group:
    with N = 2 nodes and G = 2 heads, the rows are (node 0, head 0), (1, 0), (0, 1), (1, 1).
    """

    entries: Tensor  # [R, N, 2 * Hkv] int64: where each node's keys and values go, in a flat view of a layer
    positions: Tensor  # [R, N] int64: rotary positions; [R, N, 3] on three axes
    # One call of attention each: rows of the pass, rows of the cache, and the mask [rows, 1, G * N, entries
    # to read], which is added: 0 where a query row may attend, -inf elsewhere.
    calls: Sequence[tuple[slice, slice | Tensor, Tensor]]
    kernel: Attend

    def attend(self, store: Tensor, query: Tensor, kv: Tensor) -> Tensor:
        """Writes the nodes' keys and values into a layer, then returns the nodes' attention [R * N, H * E].

        store [R, 2, Hkv, C, >= E]: one of KVCache.layers. query [R * N, H, E]. kv [R * N, 2 * Hkv, E]: keys,
        then values. The dtype of the result and of the computation is that of the cache.
        """
        (rows, nodes), (heads, size) = self.positions.shape[:2], query.shape[1:]
        self.write(store, kv)
        padding = store.shape[-1] - size
        query = query.to(store.dtype)
        if padding:
            query = F.pad(query, (0, padding))
        kv_heads, groups = store.shape[2], heads // store.shape[2]
        folded = query.view(rows, nodes, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scale = 1.0 / math.sqrt(size)  # of the unpadded head
        by_call = []
        for own, cached, mask in self.calls:
            key, value = store[cached, :, :, : mask.shape[-1]].unbind(1)
            by_call.append(self.kernel(folded[own], key, value, mask, scale))
        # One of several calls is for one image, and row g * B + b of the pass is image b in branch g.
        mixed = by_call[0] if len(by_call) == 1 else torch.stack(by_call, dim=1).flatten(0, 1)
        mixed = mixed.view(rows, kv_heads, groups, nodes, -1).permute(0, 3, 1, 2, 4)
        if padding:
            mixed = mixed.narrow(-1, 0, size)
        return mixed.reshape(rows * nodes, heads * size)

    def write(self, store: Tensor, kv: Tensor) -> None:
        """Writes kv [R * N, 2 * Hkv, E] at the pass's entries of a layer."""
        flat = store.view(-1, store.shape[-1])
        if flat.shape[-1] > kv.shape[-1]:
            flat = flat.narrow(-1, 0, kv.shape[-1])
        flat.index_put_((self.entries,), kv.to(store.dtype).view(*self.entries.shape, -1))


class KVCache:
    """Keys and values of every layer. A row is one image in one guidance branch; each has a length.

    Invariant: entries [0, length[r]) of row r hold exactly the committed prefix. The rotary position of the
    next node is position[r]. length and position are one tensor, except in families that leave padding out of
    the cache: there position runs ahead. Later entries are scratch for the current tree:

        entry    0 ....... length - 1 | length ............ length + M - N - 1 | ... length + M - 1
        holds    committed prefix     | nodes of earlier passes over this tree | the N nodes of this pass

    scratch() places a tree of a drafter behind the longest prefix instead. Nothing is ever concatenated or
    reallocated.
    """

    def __init__(
        self,
        store: Tensor,
        length: Tensor,
        position: Tensor | None = None,
        head_groups: int = 1,
        axes: AxisPositions | None = None,
        kernel: Attend = sdpa,
    ) -> None:
        """Makes a cache of store [L, R, 2, Hkv, C, E]. length [R] int64: number of committed entries of each
        row. position [R] int64: given if it differs from length. head_groups: G. axes: given if rotary
        positions have three axes. kernel: computes attention."""
        self.store, self.length, self.head_groups, self.axes = store, length, head_groups, axes
        self.kernel = kernel
        self.position = length if position is None else position
        self._counters = (length,) if position is None else (length, position)
        rows, heads, capacity = store.shape[1], 2 * store.shape[3], store.shape[4]
        # First entry of each head's keys or values in the flat view of a layer, [R, 1, 2 * Hkv].
        starts = torch.arange(0, rows * heads * capacity, capacity, device=store.device)
        self._starts = starts.view(rows, 1, heads)
        self._columns = torch.arange(aligned(capacity), device=store.device)
        self._flat = store.view(len(store), -1, store.shape[-1])
        self.layers = store.unbind(0)  # each [R, 2, Hkv, C, E]: keys, then values

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        padded: bool = False,
        axes: AxisPositions | None = None,
        few_shapes: bool = False,
    ) -> KVCache:
        """Returns an empty cache for a decoder of this shape. All entries of a head are contiguous, because
        attention reads them in this order.

        padded: the cache leaves out the padding of prefixes, so that positions run ahead of entries. On a GPU
        zeros extend every head to a multiple of ALIGNMENT: other sizes have no fused kernel. few_shapes:
        passes over all rows are rounded up to few shapes.
        """
        heads = config.num_kv_heads
        size = config.head_dim if device.type == "cpu" else aligned(config.head_dim)
        store = torch.zeros(config.num_layers, rows, 2, heads, capacity, size, dtype=dtype, device=device)
        length = torch.zeros(rows, dtype=torch.int64, device=device)
        position = torch.zeros_like(length) if padded else None
        kernel = choose_kernel(device, dtype, few_shapes, size)
        return cls(store, length, position, config.num_heads // heads, axes, kernel)

    @property
    def capacity(self) -> int:
        """Number of entries of a row."""
        return self.store.shape[4]

    @property
    def may_skip_rows(self) -> bool:
        """True if passes may leave out rows, and are faster then: on a CPU every row of a pass costs."""
        return self.store.device.type == "cpu"

    def row(self, index: int) -> KVCache:
        """Returns the one-row cache over the same memory. A prompt may have any shape."""
        at = slice(index, index + 1)
        position = None if self.position is self.length else self.position[at]
        axes = None if self.axes is None else self.axes.row(at)
        kernel = choose_kernel(self.store.device, self.store.dtype, few_shapes=False)
        return KVCache(self.store[:, at], self.length[at], position, self.head_groups, axes, kernel)

    def clear(self, rows: slice = slice(None)) -> None:
        """Empties the rows."""
        for counter in self._counters:
            counter[rows] = 0
        if self.axes is not None:
            self.axes.clear(rows)

    def erase(self, rows: slice) -> None:
        """Empties the rows and fills them with zeros. Masks do not hide NaN: 0 times NaN is NaN, so entries
        of an image whose logits were not numbers would spoil the next image in its rows."""
        self.clear(rows)
        self.store[:, rows] = 0

    def begin(self, count: int, padding: int = 0) -> None:
        """Commits the first `count` entries of an empty cache without the first `padding` of them. The others
        move to the front. The next position is count, as if the padding were there."""
        if padding:
            assert self.position is not self.length, "this cache was not allocated for padding"
            self.store[..., : count - padding, :] = self.store[..., padding:count, :].clone()
            self.position += padding
        for counter in self._counters:
            counter += count - padding
        if self.axes is not None:
            self.axes.begin(self.position)

    def metadata(self, depths: Tensor, ancestors: Tensor, lengths: Sequence[int | None]) -> AttentionMetadata:
        """Places N nodes after the committed prefix and the M - N nodes of earlier passes over the tree.

        depths [R, N] int64: the rotary positions, counted from that of the next node. ancestors [R, N, M]
        bool: node n attends to the whole prefix and to entry length + m where ancestors[r, n, m]; the N nodes
        of this pass are the last of the M. lengths: upper bounds on length that the host knows, so that
        it need not wait for the device. That of row r is lengths[r % len(lengths)]; if it is None, the pass
        leaves the row out, as depths and ancestors do. Raises ValueError if the cache is too small for
        max(lengths) + M entries.
        """
        nodes, tree_entries = ancestors.shape[1:]
        context_len = max(length for length in lengths if length is not None) + tree_entries
        if context_len > self.capacity:
            raise ValueError(f"the cache has {self.capacity} entries a row, {context_len} are needed")
        rows = self._rows(lengths)
        length, columns = self.length[rows, None], self._columns
        positions = self.position[rows, None] + depths
        if self.axes is not None:
            positions = self.axes.row(rows).place(positions)
        # The mask is additive, because SDPA would convert a boolean one in every layer. Its columns beyond
        # context_len make the row stride a multiple of ALIGNMENT; with another stride, CUDA would copy the
        # mask in every layer.
        shape = (*ancestors.shape[:2], aligned(context_len))
        mask = torch.zeros(shape, dtype=self.store.dtype, device=ancestors.device)
        mask.masked_fill_((columns[: shape[2]] >= length)[:, None], float("-inf"))
        tree_mask = torch.zeros(ancestors.shape, dtype=mask.dtype, device=mask.device)
        tree_mask.masked_fill_(~ancestors, float("-inf"))
        # The clamp concerns unused rows alone, which may be longer than their bound.
        tree_columns = (length + columns[:tree_entries]).clamp(max=context_len - 1)
        mask.scatter_(2, tree_columns[:, None].expand(-1, nodes, -1), tree_mask)
        if self.head_groups > 1:
            mask = mask.repeat(1, self.head_groups, 1)
        mask = mask[:, None, :, :context_len]
        return AttentionMetadata(
            entries=self._flat_entries(length + columns[tree_entries - nodes : tree_entries], rows),
            positions=positions,
            calls=self._calls(lengths, rows, mask, tree_entries),
            kernel=self.kernel,
        )

    def scratch(self, depths: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
        """Places the N nodes of a tree that is never committed behind all prefixes, at the same entries in
        rows of any length.

        depths [N]: as in metadata(). bound: an upper bound on all lengths. Returns positions and entries as
        in AttentionMetadata, and an additive mask of the F entries before these nodes, [R, 1, F]: 0 in the
        prefix. F + N is a multiple of ALIGNMENT.
        """
        end = aligned(bound + len(depths))
        first = end - len(depths)
        assert end <= self.capacity, "the cache is too small for the tree"
        positions = self.position[:, None] + depths  # no drafter has positions of several axes
        mask = torch.zeros(len(self.length), 1, first, dtype=self.store.dtype, device=self.store.device)
        mask.masked_fill_((self._columns[:first] >= self.length[:, None])[:, None], float("-inf"))
        return positions, self._flat_entries(self._columns[first:end]), mask

    def _rows(self, lengths: Sequence[int | None]) -> slice | Tensor:
        """Returns the rows that metadata() does not leave out."""
        if None not in lengths:
            return slice(None)
        numbers = range(len(self.length))
        present = [row for row in numbers if lengths[row % len(lengths)] is not None]
        return to_device(present, self.length.device)

    def _calls(
        self, lengths: Sequence[int | None], rows: slice | Tensor, mask: Tensor, tree_entries: int
    ) -> list[tuple[slice, slice | Tensor, Tensor]]:
        """Returns AttentionMetadata.calls: one for all `rows` of the pass, unless on a CPU a slot is left
        out, or images are on average more than UNUSED entries shorter than the longest. Then every image has
        a call of its own, which reads no more entries than the image has."""
        images = [(slot, length) for slot, length in enumerate(lengths) if length is not None]
        present = [length for _, length in images]
        unused = max(present) * len(present) - sum(present)
        alike = len(present) == len(lengths) and unused <= UNUSED * len(present)
        if self.store.device.type != "cpu" or alike:
            return [(slice(None), rows, mask)]
        calls = list[tuple[slice, slice | Tensor, Tensor]]()
        for place, (slot, length) in enumerate(images):
            own, cached = slice(place, None, len(images)), slice(slot, None, len(lengths))
            calls.append((own, cached, mask[own, ..., : length + tree_entries]))
        return calls

    def commit(self, path: Tensor, count: Tensor, leafy_chain: bool = False) -> None:
        """Appends the tree nodes path[r, :count[r]] to the prefix of row r, in place.

        path [R, A] int64 increases strictly up to count, and path[r, 0] = 0; later passes ignore the entries
        from count on. count [R] int64. Entry length + path[j] moves to entry length + j. Example, path 0 2 5:

            entry     length   +1        +2        +3   +4   +5
            before    node 0   node 1    node 2    3    4    5
            after     node 0   node 2    node 5    free

        The root never moves. On a leafy chain (DraftTree) only the last node of a path can be out of place,
        and moving that one alone is several times cheaper.
        """
        if path.shape[1] > 1:
            place = self._columns[1 : path.shape[1]]  # j of every node but the root
            if leafy_chain:
                place = count[:, None] - 1
                path = path.gather(1, place)
            else:
                path = path[:, 1:]
            self.move(path, place)
        for counter in self._counters:
            counter += count

    def move(self, source: Tensor, place: Tensor) -> None:
        """Copies the entries length + source to length + place, both [R, E] or alike, in every row."""
        length = self.length[:, None]
        moved = self._flat.index_select(1, self._flat_entries(length + source).flatten())
        self._flat.index_copy_(1, self._flat_entries(length + place).flatten(), moved)

    def _flat_entries(self, entries: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Returns the indices of entries [R, N] of some rows in the flat view of a layer, for every head of
        keys and of values: [R, N, 2 * Hkv] int64."""
        return self._starts[rows] + entries[..., None]
