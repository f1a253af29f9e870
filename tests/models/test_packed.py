"""Packed weights compute the same function for one row as for hundreds, and nothing else of the model
changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adt_tree.settings import Sampling
from models.decoder.cache import KVCache
from models.decoder.config import DecoderConfig
from models.decoder.packed import (
    PackedBlock,
    PackedLinear,
    Product,
    cache_dtype,
    pack,
    packable,
    split_norm,
)
from models.decoder.transformer import MLP, Block, attend_causally, rotary_table
from models.target import chain_mask
from tests.support.checkpoints import load

pytestmark = pytest.mark.skipif(not packable(torch.ones(1, 1)), reason="this torch has no oneDNN")

ROWS = (1, 2, 7, 70, 600)


def inputs(width: int) -> list[torch.Tensor]:
    """Returns rows with one and with two leading dimensions, and rows that are not contiguous."""
    torch.manual_seed(0)
    contiguous = [torch.randn(2, rows, width) for rows in ROWS] + [torch.randn(3, width)]
    return [*contiguous, torch.randn(2, width, 9).transpose(1, 2)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_what_is_fused_into_it(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    packed = Product(linear.weight, linear.bias)
    for x in inputs(48):
        plain = linear(x)
        other = torch.randn_like(plain)
        before = other.clone()
        pairs = (
            (packed(x), plain),
            (packed.activated(x, gelu=False), F.silu(plain)),
            (packed.activated(x, gelu=True), F.gelu(plain, approximate="tanh")),
            (packed.times(x, other), plain * other),
            (packed.plus(x, other), plain + other),
        )
        for result, expected in pairs:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(other, before), "a product wrote to its second input"


def test_a_norm_and_its_scale_apart() -> None:
    torch.manual_seed(3)
    norm = nn.RMSNorm(48, 1e-3)
    norm.weight = nn.Parameter(torch.rand(48), requires_grad=False)
    rows, scale = split_norm(norm)
    for x in inputs(48):
        torch.testing.assert_close(rows(x) * scale, norm(x), rtol=1e-5, atol=1e-6)
    for tiny in (torch.full((1, 48), 1e-3), torch.zeros(1, 48)):  # eps is not negligible
        torch.testing.assert_close(rows(tiny) * scale, norm(tiny), rtol=1e-5, atol=1e-8)


def random_layer(config: DecoderConfig, std: float) -> Block:
    """Returns a random layer."""
    block = Block(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(1 if parameter.dim() == 1 else 0, std)
    return block


def causally(block: Block | PackedBlock, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Applies a layer to whole sequences, without a cache."""
    return block.merge(x, attend_causally(*block.project(x, rotation)))


def through_a_cache(
    packed: PackedBlock, x: torch.Tensor, rotation: torch.Tensor, config: DecoderConfig, dtype: torch.dtype
) -> torch.Tensor:
    """Applies a layer to rows [2, N, width], which become the first ones of a cache."""
    count = x.shape[1]
    cache = KVCache.allocate(config, 2, count + 10, dtype, x.device)
    seen = chain_mask(count, x.device).expand(2, -1, -1)
    meta = cache.metadata(torch.arange(count).expand(2, -1), seen, [0])
    flat = rotation.expand(2, *rotation.shape[1:]).flatten(0, 1)
    rows = x.flatten(0, 1)
    return packed.merge(rows, meta.attend(cache.layers[0], *packed.project(rows, flat))).view_as(x)


@pytest.mark.parametrize(
    ("kv_heads", "fields"),
    [
        (4, {"qk_norm": False, "input_norm": True}),
        (2, {"qk_norm": True, "input_norm": True}),
        (4, {"qk_norm": True, "input_norm": False}),
        (2, {"qkv_bias": True, "rope_sections": (1, 2, 1)}),  # rotates only some pairs of a head
    ],
)
def test_a_layer(kv_heads: int, fields: dict[str, Any]) -> None:
    config = DecoderConfig(10, 48, 100, 1, 4, kv_heads, **fields)
    torch.manual_seed(2)
    block = random_layer(config, 0.3)
    x = torch.randn(2, 9, 48)
    rotation = rotary_table(config)[torch.arange(9)[None]].unsqueeze(2)
    whole = causally(block, x, rotation)
    packed = PackedBlock(block)
    torch.testing.assert_close(causally(packed, x, rotation), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        through_a_cache(packed, x, rotation, config, x.dtype), whole, rtol=1e-4, atol=1e-4
    )


def test_a_decoder_with_its_head(tiny_checkpoint: Path) -> None:
    model = load("emoji", tiny_checkpoint)
    plain = copy.deepcopy(model.decoder)
    target = model.target(1, Sampling(), 5, 20)
    model.drafter(target, 2, 2)
    assert not any(isinstance(part, nn.Linear) for part in model.decoder.blocks.modules())
    assert not any(isinstance(part, nn.Linear) for part in model.drafter_net.modules())
    assert isinstance(model.decoder.head, PackedLinear)
    with torch.inference_mode():
        tokens = torch.arange(12)[None]
        features = model.decoder.causal(tokens)
        torch.testing.assert_close(features, plain.causal(tokens), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.logits(features), plain.head(features), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not packable(torch.ones(1, 1).bfloat16()), reason="no bf16 products on this CPU")
@pytest.mark.parametrize("fields", [{"qk_norm": False}, {"qk_norm": True}])
def test_a_layer_in_bf16_is_nearer_fp32_than_torchs(fields: dict[str, bool]) -> None:
    torch.manual_seed(4)
    config = DecoderConfig(10, 192, 512, 1, 6, **fields)
    rough = random_layer(config, 0.05).bfloat16()
    exact, packed = copy.deepcopy(rough).float(), PackedBlock(copy.deepcopy(rough))
    x, rotation = (
        torch.randn(2, 40, 192).bfloat16(),
        rotary_table(config)[torch.arange(40)[None]].unsqueeze(2),
    )
    whole = causally(exact, x.float(), rotation)
    dtype = cache_dtype(rough.mlp.down.weight)
    cached = through_a_cache(packed, x, rotation, config, dtype)
    assert dtype == torch.float32 and cached.dtype == torch.bfloat16
    outputs = (causally(packed, x, rotation), cached, causally(rough, x, rotation))
    *ours, torchs = [(out.float() - whole).pow(2).mean().sqrt() for out in outputs]
    assert 0 < max(ours) < torchs < 0.02 * whole.pow(2).mean().sqrt()


def test_what_gains_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing gains nothing in half precision if the CPU cannot multiply in it."""
    monkeypatch.setattr("models.decoder.packed.packable", lambda weight: weight.dtype == torch.float32)
    net = nn.Sequential(nn.Linear(4, 4), MLP(DecoderConfig(10, 8, 8, 1, 2))).bfloat16()
    before = list(net.state_dict())
    pack(net)
    assert list(net.state_dict()) == before
    assert cache_dtype(torch.randn(4, 6).bfloat16()) == torch.bfloat16
