"""--attention flash gives the results of sdpa.

flash-attn needs a GPU, so a function with its documented behaviour, which reads the same tensors, stands in
for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree import Pipeline, Sampling


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, causal: bool
) -> Tensor:
    """Attends from q [R, N, H, E] to the first cache_seqlens [R] slots, causally from the last slot
    backwards."""
    assert causal and cache_seqlens.dtype == torch.int32 and q.stride(-1) == k_cache.stride(-1) == 1
    nodes, slots = q.shape[1], torch.arange(k_cache.shape[1])
    last = cache_seqlens[:, None] - nodes + torch.arange(nodes)  # the last slot that each node sees
    mask = (slots <= last[..., None])[:, None]
    read = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return F.scaled_dot_product_attention(*read, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the stand-in of flash-attn."""
    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def test_the_baseline_is_the_same(flash: None, pipe: Pipeline) -> None:
    """Prompts have several lengths, and the images are made with and without guidance."""
    other = Pipeline(replace(pipe.model, attention="flash"))
    for guidance, batch_size in ((1.0, 1), (3.0, 2)):
        options = {"sampling": Sampling(guidance=guidance), "seed": 3, "batch_size": batch_size}
        prompts = ["sun", "a red moon over the sea", "x"]
        assert other(prompts, "ar", **options).codes == pipe(prompts, "ar", **options).codes


def test_draft_trees_are_refused(flash: None, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="attention flash"):
        Pipeline(replace(pipe.model, attention="flash"))("sun", method="self-draft")
