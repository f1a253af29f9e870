"""Layers as the CPU runs them fastest: weights in oneDNN's blocked layout; norms, the MLP's gate and residual
sums fused into the products.

A pass has a few rows up to some hundreds. For so few, torch's own product spends its time on packing the
weights, anew every time; here they are packed once. Between the products the time goes into small operations
and the interpreter, so a layer is one straight line. The function stays the same up to rounding.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from models.cache import KVCache, Span
from models.transformer import Block, attend, attend_causally, split_heads

ROWS = 64  # a hint for the layout; from 2 to some hundreds of rows oneDNN chooses the same one


def packable(weight: Tensor) -> bool:
    """Whether products with the weight gain: fp32 on a CPU whose torch has oneDNN."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.layout == torch.strided and torch.backends.mkldnn.is_available()


class Product:
    """x W^T + b for x [..., D], and what oneDNN does in the same sweep. No module: looking up a module's
    parts takes as long as a small product."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, D] is copied, bias [out] kept."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def __deepcopy__(self, memo: dict) -> Self:
        """Itself: what is packed is opaque, and never written."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """silu of the product."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times factor [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")

    def plus(self, x: Tensor, stream: Tensor) -> Tensor:
        """stream [..., out] + the product."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, stream, self.weight, self.bias, "add")


class PackedLinear(nn.Module):
    """A Product where a module has to stand."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """See Product."""
        super().__init__()
        self.product = Product(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., out]."""
        return self.product(x)


class RowNorm:
    """What is left of nn.RMSNorm, seven small steps on a CPU, once its scale is in the products behind it:
    x / sqrt(sum(x^2) + D eps), in three."""

    __slots__ = ("least",)

    def __init__(self, norm: nn.RMSNorm) -> None:
        assert norm.eps is not None, "a decoder's configuration names it"
        self.least = torch.tensor((norm.weight.numel() * norm.eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [..., D] of length 1, or less where eps is not negligible."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.least)


def scale_of(norm: nn.RMSNorm) -> Tensor:
    """[D]: a norm's weight times the root of its width, what RowNorm leaves out."""
    return norm.weight.detach() * norm.weight.numel() ** 0.5


class PackedBlock(nn.Module):
    """See Block: the same layer, in as few steps as it takes on a CPU."""

    def __init__(self, block: Block) -> None:
        """block is taken apart: no product of it is there twice for longer than it takes to pack."""
        super().__init__()
        attention, mlp, norm = block.attention, block.mlp, block.attention_norm
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        affine = attention.affine
        self.affine = None if affine is None else (affine[0].detach(), affine[1].detach())
        self.attention_norm = RowNorm(norm) if isinstance(norm, nn.RMSNorm) else None
        self.mlp_norm = RowNorm(block.mlp_norm)
        qkv, out = attention.qkv, attention.out
        before = scale_of(norm) if isinstance(norm, nn.RMSNorm) else 1.0
        self.qkv = Product(qkv.weight * before, qkv.bias)
        self.out = Product(out.weight, out.bias)
        del block.attention, attention, qkv, out
        behind = scale_of(block.mlp_norm)
        gate, up = mlp.gate_up.weight.chunk(2)
        self.gate = Product(gate * behind)
        self.up = Product(up * behind)
        del mlp.gate_up, gate, up
        self.down = Product(mlp.down.weight)

    def forward(self, x: Tensor, turn: Tensor, layer: int, cache: KVCache, span: Span) -> Tensor:
        """See Block."""
        return self._merge(x, attend(*self._project(x, turn), layer, cache, span))

    def causal(self, x: Tensor, turn: Tensor) -> Tensor:
        """See Block."""
        return self._merge(x, attend_causally(*self._project(x, turn)))

    def _project(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        return split_heads(self.qkv(normed), turn, self.heads, self.kv_heads, self.affine)

    def _merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input and what its heads read."""
        x = self.out.plus(mixed, x)
        normed = self.mlp_norm(x)
        return self.down.plus(self.up.times(normed, self.gate.silu(normed)), x)


def pack(module: nn.Module) -> None:
    """Replace a module's layers and products, in place, where that gains; one by one, so that no more than
    one is there twice. Decoding alone can use what is left: it has no gradients and no state dict to save."""
    for name, child in module.named_children():
        if isinstance(child, Block):
            if packable(child.mlp.down.weight):
                setattr(module, name, PackedBlock(child))
        elif isinstance(child, nn.Linear):
            if packable(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack(child)


def product(weight: Tensor) -> nn.Module:
    """The module x -> x W^T of a weight [out, D], of which a copy is taken."""
    if packable(weight):
        return PackedLinear(weight)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear
