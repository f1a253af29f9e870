"""Where keys and values lie in the cache."""

from __future__ import annotations

import torch

from models.cache import KVCache
from models.target import chain_mask


def test_a_head_is_read_in_one_piece() -> None:
    """Rows of different lengths: every node's keys and values stand in its own slot, all of a head's in one
    piece of memory (a piece per slot costs the AR baseline time, docs/LOG.md)."""
    cache, kv = KVCache.allocate(2, 2, 9, 3, 4, torch.float32, torch.device("cpu")), torch.randn(4, 2, 3, 4)
    cache.length += torch.tensor([5, 2])
    meta = cache.metadata(torch.arange(2).expand(2, -1), chain_mask(2, kv.device).expand(2, -1, -1), 5)
    for part, given in zip(cache.write(1, meta, kv), kv.unbind(1), strict=True):
        assert part.shape == (2, 3, 7, 4) and all(head.is_contiguous() for row in part for head in row)
        for row, length in enumerate((5, 2)):
            written = part[row, :, length : length + 2].transpose(0, 1)
            assert torch.equal(written, given[2 * row : 2 * row + 2])
        assert part.count_nonzero() == given.numel()
