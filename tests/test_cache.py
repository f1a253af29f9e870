"""The cache: where keys and values lie, and --attention flash, which reads it to the same end.

flash-attn itself needs a GPU; a stand-in of its documented function reads the same tensors here.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree import Pipeline, Sampling
from models.cache import KVCache
from models.errors import CheckpointError
from models.loading import load
from models.spec import LoadOptions
from models.target import chain_mask
from tests.conftest import Refused


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


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, causal: bool
) -> Tensor:
    """q [R, N, H, E] over the first cache_seqlens [R] slots, causal from the last slot backwards."""
    assert causal and cache_seqlens.dtype == torch.int32 and q.stride(-1) == k_cache.stride(-1) == 1
    nodes, slots = q.shape[1], torch.arange(k_cache.shape[1])
    last = cache_seqlens[:, None] - nodes + torch.arange(nodes)  # the last slot that each node sees
    mask = (slots <= last[..., None])[:, None]
    read = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return F.scaled_dot_product_attention(*read, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn, as far as it is used."""
    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_baseline_is_the_same(flash: None, pipe: Pipeline, batch_size: int) -> None:
    """Prompts of several lengths, with and without guidance."""
    other = Pipeline(replace(pipe.model, attention="flash"))
    for guidance in (1.0, 3.0):
        how = {"method": "ar", "sampling": Sampling(guidance=guidance), "seed": 3, "batch_size": batch_size}
        prompts = ["sun", "a red moon over the sea", "x"]
        assert other(prompts, **how).codes == pipe(prompts, **how).codes


def test_draft_trees_are_refused(flash: None, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="draft trees .* need a mask"):
        Pipeline(replace(pipe.model, attention="flash"))("sun", method="self-draft")


def test_what_it_needs_is_named(refused: Refused, tmp_path: Path) -> None:
    words = "generate_images --attention flash --device cpu --model_type base --output_dir".split()
    assert "--attention flash: flash-attn needs a CUDA device" in refused(*words, tmp_path / "out")
    assert not (tmp_path / "out" / "generation_configs.json").exists()
    with pytest.raises(CheckpointError, match="choose sdpa or flash"):
        load("emoji", LoadOptions(attention="xformers"))
