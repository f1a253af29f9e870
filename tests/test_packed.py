"""Packed weights give the function they were packed from, for one row as for hundreds; the rest stays."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from adt_tree.sampling import Sampling
from models.packed import PackedLinear, PackedMLP, RowNorm, pack, packable, product
from models.registry import load
from models.transformer import MLP, DecoderConfig

pytestmark = pytest.mark.skipif(not packable(torch.ones(1, 1)), reason="this torch has no oneDNN")

ROWS = (1, 2, 7, 70, 600)


def inputs(width: int) -> list[torch.Tensor]:
    """Rows in one and two leading dimensions, and rows that do not lie end to end."""
    torch.manual_seed(0)
    found = [torch.randn(2, rows, width) for rows in ROWS] + [torch.randn(3, width)]
    return [*found, torch.randn(2, width, 9).transpose(1, 2)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    packed = PackedLinear(linear.weight, linear.bias)
    for x in inputs(48):
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)


def test_an_mlp() -> None:
    torch.manual_seed(2)
    mlp = MLP(DecoderConfig(10, 48, 100, 1, 2)).requires_grad_(False)
    packed = PackedMLP(mlp)
    for x in inputs(48):
        torch.testing.assert_close(packed(x), mlp(x), rtol=1e-5, atol=1e-5)


def test_a_norm() -> None:
    torch.manual_seed(3)
    norm = nn.RMSNorm(48, 1e-3)
    norm.weight = nn.Parameter(torch.rand(48), requires_grad=False)
    for x in inputs(48):
        torch.testing.assert_close(RowNorm(norm)(x), norm(x), rtol=1e-5, atol=1e-6)
    tiny = torch.full((1, 48), 1e-3)  # eps is not negligible
    torch.testing.assert_close(RowNorm(norm)(tiny), norm(tiny), rtol=1e-5, atol=1e-8)


def test_a_decoder_with_its_head(tiny_checkpoint: Path) -> None:
    model = load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", True)
    plain = copy.deepcopy(model.decoder)
    target = model.target(1, Sampling(1.0, 0, 1.0, 3.0), 5, 20)
    model.drafter(target, 2, 2)
    assert not any(isinstance(part, nn.Linear) for part in model.decoder.blocks.modules())
    assert not any(isinstance(part, nn.Linear) for part in model.drafter_net.modules())
    assert isinstance(model.decoder.head, nn.Linear)  # targets take their rows from it
    with torch.inference_mode():
        tokens = torch.arange(12)[None]
        features = model.decoder.causal(tokens)
        torch.testing.assert_close(features, plain.causal(tokens), rtol=1e-4, atol=1e-4)
        codes = plain.head.weight[model.first_code : model.first_code + model.num_codes]
        torch.testing.assert_close(target.logits(features), features @ codes.T, rtol=1e-4, atol=1e-4)


def test_half_precision_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(4, 4), MLP(DecoderConfig(10, 8, 8, 1, 2))).bfloat16()
    before = list(net.state_dict())
    pack(net)
    assert list(net.state_dict()) == before
    weight = torch.randn(4, 6).bfloat16()
    head = product(weight)
    weight.zero_()
    assert head(torch.ones(6).bfloat16()).abs().sum() > 0, "the head took no copy"
