"""The key/value cache: where it stores entries, and that it calls attention as CUDA's fused kernels need
it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decoder.attention import choose_kernel, cudnn, memory_efficient, sdpa
from models.decoder.cache import AttentionMetadata, KVCache
from models.decoder.config import DecoderConfig
from models.decoder.transformer import attend_densely
from models.target import chain_mask
from tests.support.decoding import CPU

LENGTHS = [5, 2]  # committed slots of two rows


def placed(
    cache: KVCache, prefix: Tensor, ancestors: Tensor, lengths: Sequence[int] = (max(LENGTHS),)
) -> AttentionMetadata:
    """Writes each row's prefix [2, max_length, 2 * Hkv, E] into layer 0. Returns the metadata of tree nodes
    that follow it."""
    for row, count in enumerate(LENGTHS):
        one = cache.row(row)
        meta = one.metadata(torch.arange(count)[None], chain_mask(count, CPU), [0])
        meta.write(one.layers[0], prefix[row, :count])
        one.begin(count)
    depths = ancestors.sum(dim=2) - 1
    return cache.metadata(depths, ancestors, lengths)


def test_a_head_is_read_in_one_piece() -> None:
    """In rows of different lengths, every node's keys and values are in its slot, and all slots of a head are
    contiguous. docs/LOG.md has the measurement: with the heads of a slot together, the AR baseline is
    slower."""
    config = DecoderConfig(10, 12, 8, 2, 3)
    cache, kv = KVCache.allocate(config, 2, 9, torch.float32, CPU), torch.randn(4, 6, 4)
    cache.length += torch.tensor(LENGTHS)
    meta = cache.metadata(torch.arange(2).expand(2, -1), chain_mask(2, kv.device).expand(2, -1, -1), [5])
    meta.write(cache.layers[1], kv)
    for part, expected in zip(cache.layers[1][:, :, :, :7].unbind(1), kv.chunk(2, dim=1), strict=True):
        assert part.shape == (2, 3, 7, 4) and all(head.is_contiguous() for row in part for head in row)
        for row, length in enumerate(LENGTHS):
            written = part[row, :, length : length + 2].transpose(0, 1)
            assert torch.equal(written, expected[2 * row : 2 * row + 2])
        assert part.count_nonzero() == expected.numel()


@pytest.mark.parametrize(
    ("kv_heads", "stored", "lengths", "unused"),
    [(4, 6, [6], 0), (2, 6, [6, 3], 1), (1, 8, [6], 0), (2, 8, [6, 3], 1), (2, 8, [6, 3], 2)],
)
def test_attention_over_a_tree(
    kv_heads: int, stored: int, lengths: list[int], unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped and padded heads give the attention that a dense computation over each row's sequence gives, in
    a call for each image or, if the mean of unused entries (1.5) is within the bound, in one."""
    torch.manual_seed(0)
    monkeypatch.setattr("models.decoder.cache.UNUSED", unused)
    heads, size, nodes = 4, 6, 3
    store = torch.zeros(1, 2, 2, kv_heads, 20, stored)
    cache = KVCache(store, torch.zeros(2, dtype=torch.int64), head_groups=heads // kv_heads)
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, -1, -1)
    prefix, kv = torch.randn(2, 5, 2 * kv_heads, size), torch.randn(2 * nodes, 2 * kv_heads, size)
    meta, query = placed(cache, prefix, ancestors, lengths), torch.randn(2 * nodes, heads, size)
    calls, sdpa = [], F.scaled_dot_product_attention

    def watched(*args: Tensor, **options: object) -> Tensor:
        calls.append((args, options))
        return sdpa(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("models.decoder.cache.F.scaled_dot_product_attention", watched)
        mixed = meta.attend(cache.layers[0], query, kv).view(2, nodes, heads * size)
    if unused == 2:
        lengths = lengths[:1]
    assert len(calls) == len(lengths)
    for ((folded, key, value), options), length in zip(calls, lengths, strict=True):
        assert set(options) == {"attn_mask", "scale"}, "enable_gqa with a mask has no fused kernel"
        assert folded.shape == (2 // len(lengths), kv_heads, heads // kv_heads * nodes, stored)
        assert key.shape == value.shape == (2 // len(lengths), kv_heads, length + nodes, stored)
    for row, length in enumerate(LENGTHS):
        sequence = torch.cat((prefix[row, :length], kv.view(2, nodes, 2 * kv_heads, size)[row]))[None]
        mask = torch.cat((torch.ones(nodes, length, dtype=torch.bool), ancestors[row]), dim=1)
        expected = attend_densely(query.view(2, nodes, heads, size)[row][None], sequence, mask)
        torch.testing.assert_close(mixed[row], expected[0], rtol=1e-5, atol=1e-6)
    assert not store[..., size:].any()


def test_heads_are_padded_off_the_cpu() -> None:
    """The heads of the class-conditional LlamaGen-3B have size 100."""
    config = DecoderConfig(10, 3200, 8, 2, 32)
    sizes = {
        name: KVCache.allocate(config, 1, 9, torch.bfloat16, torch.device(name)).store.shape[-1]
        for name in ("cpu", "meta")
    }
    assert sizes == {"cpu": 100, "meta": 104}


def test_the_kernel_follows_device_type_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN plans for every shape, so it computes only what is rounded up to few of them."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    cuda, half, full = torch.device("cuda"), torch.bfloat16, torch.float32
    for capability, expected in (((9, 0), cudnn), ((7, 5), memory_efficient)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert choose_kernel(cuda, half, few_shapes=True) is expected
        assert choose_kernel(cuda, half, few_shapes=True, head_size=256) is memory_efficient
    assert choose_kernel(cuda, half, few_shapes=False) is memory_efficient
    assert choose_kernel(cuda, full, few_shapes=True) is memory_efficient
    assert choose_kernel(CPU, half, few_shapes=True) is sdpa
