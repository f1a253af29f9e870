"""Layers for the CPU: weights in oneDNN's blocked layout; norms, the MLP's gate and the residual sums fused
into the products.

A pass over a tree has between one and a few hundred rows. For so few rows the product of torch spends most of
its time on packing the weights, in every call; here they are packed once. Small operations and the
interpreter take the rest of the time, so a layer is one straight line of few calls. The results stay the same
up to rounding: bf16 weights multiply bf16 rows, norms and attention are fp32.

Dimensions: R rows, N nodes, D features, H query heads, Hkv key/value heads, E head size.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from models.decoder.transformer import QK_NORM_EPS, Attention, Block

EXPECTED_ROWS = 64  # a hint for the layout; oneDNN chooses the same one for 2 rows and for some hundreds


def packable(weight: Tensor) -> bool:
    """Returns whether packing makes products with the weight faster. It does on a CPU whose torch has oneDNN,
    for fp32 and, if the CPU has AVX-512, for bf16."""
    plain = weight.device.type == "cpu" and weight.layout == torch.strided
    if not (plain and torch.backends.mkldnn.is_available()):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype for the keys and values of layers with such weights. Packed layers attend in fp32: in
    a plain step a CPU reads an fp32 cache several times faster than a bf16 one, although it is twice as large
    (docs/LOG.md)."""
    return torch.float32 if packable(weight) else weight.dtype


class Product:
    """x W^T + b for x [..., D], alone or fused with an operation on the result. Not a module: looking up the
    attributes of a module takes as long as a small product."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Packs a copy of weight [out, D]; keeps bias [out]."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()

    def __deepcopy__(self, memo: dict) -> Self:
        """Returns itself: a packed weight is opaque and never written."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product, [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def activated(self, x: Tensor, gelu: bool) -> Tensor:
        """Returns silu of the product, or gelu in its tanh form."""
        name, form = ("gelu", "tanh") if gelu else ("swish", "")
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, name, [], form)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns the product times factor [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")

    def plus(self, x: Tensor, stream: Tensor) -> Tensor:
        """Returns stream [..., out] plus the product."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, stream, self.weight, self.bias, "add")


class PackedLinear(nn.Module):
    """An nn.Linear with a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Packs weight [out, D] with bias [out]."""
        super().__init__()
        self.product = Product(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., out]."""
        return self.product(x)


class RowNorm:
    """RMSNorm without its scale, which split_norm() folds into the next weight: x / sqrt(sum(x^2) + D eps),
    in three operations instead of seven. Also LayerNorm without its scale, where rows have a mean of 0."""

    __slots__ = ("floor",)

    def __init__(self, width: int, eps: float) -> None:
        """width: D."""
        self.floor = torch.tensor((width * eps) ** 0.5, dtype=torch.float32, device="cpu")

    def __call__(self, x: Tensor) -> Tensor:
        """Returns rows [..., D] of length 1, or less where eps is not negligible. Computes in fp32."""
        wide = x.float()
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self.floor)
        return (wide / length).to(x.dtype)


def split_norm(norm: nn.RMSNorm) -> tuple[RowNorm, Tensor]:
    """Returns the scale-free norm and scale * sqrt(D) [D], which is folded into the next weight."""
    assert norm.eps is not None, "a decoder's configuration names it"
    width = norm.weight.numel()
    return RowNorm(width, norm.eps), norm.weight.detach().float() * width**0.5


class PackedHeads:
    """transformer.split_heads in few operations: queries and keys stay where the product wrote them."""

    __slots__ = ("heads", "kv_heads", "norm", "product", "scale", "shift")

    def __init__(self, attention: Attention, input_scale: Tensor) -> None:
        """input_scale [D] or []: a factor for each column of the projection."""
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        weight = attention.qkv.weight.detach().float() * input_scale
        self.norm = None
        if attention.affine is not None:
            # LayerNorm subtracts the mean of a head. Here the mean is taken out of the head's rows of weights
            # once, so that every head comes out with a mean of 0, and RowNorm is enough.
            normed = weight.unflatten(0, (self.heads + 2 * self.kv_heads, -1))[: self.heads + self.kv_heads]
            normed -= normed.mean(dim=1, keepdim=True)
            self.norm = RowNorm(attention.head_dim, QK_NORM_EPS)
            scale, self.shift = (part.detach().float() for part in attention.affine)
            self.scale = scale * attention.head_dim**0.5
        self.product = Product(weight.to(attention.qkv.weight.dtype), attention.qkv.bias)

    def __call__(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries [..., H, E], and keys followed by values [..., 2 * Hkv, E], of x [..., D]: fp32,
        views of one product."""
        fused = self.product(x).float()
        fused = fused.view(*fused.shape[:-1], self.heads + 2 * self.kv_heads, -1)
        qk = normed = fused.narrow(-2, 0, self.heads + self.kv_heads)
        if self.norm is not None:
            normed = torch.addcmul(self.shift, self.norm(qk), self.scale)
        # (a + b i) (cos + sin i): one complex product is the fastest rotation on a CPU.
        turn = torch.view_as_complex(rotation.select(-2, 0))
        torch.mul(as_complex(normed), turn, out=as_complex(qk))
        return fused.narrow(-2, 0, self.heads), fused.narrow(-2, self.heads, 2 * self.kv_heads)


def as_complex(x: Tensor) -> Tensor:
    """Returns the adjacent pairs of fp32 x [..., E] as complex numbers [..., E/2] in its memory."""
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


class PackedBlock(nn.Module):
    """A Block without norms behind attention and MLP, in as few operations as a CPU needs."""

    def __init__(self, block: Block) -> None:
        """Takes block apart, so that no more than one weight stands in memory twice while packing."""
        super().__init__()
        mlp, norm = block.mlp, block.attention_norm
        self.attention_norm, attention_scale = None, torch.ones((), dtype=torch.float32, device="cpu")
        if isinstance(norm, nn.RMSNorm):
            self.attention_norm, attention_scale = split_norm(norm)
        self.mlp_norm, mlp_scale = split_norm(block.mlp_norm)
        self.heads = PackedHeads(block.attention, attention_scale)
        self.out = Product(block.attention.out.weight)
        del block.attention
        self.gelu = mlp.gelu
        gate, up = mlp.gate_up.weight.chunk(2)
        self.gate, self.up = (Product((part.detach() * mlp_scale).to(part.dtype)) for part in (gate, up))
        del mlp.gate_up, gate, up
        self.down = Product(mlp.down.weight)

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(x if self.attention_norm is None else self.attention_norm(x), rotation)

    def merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.out.plus(mixed.to(x.dtype), x)
        normed = self.mlp_norm(x)
        return self.down.plus(self.up.times(normed, self.gate.activated(normed, self.gelu)), x)


def pack(module: nn.Module) -> None:
    """Replaces a module's layers and linear maps by packed ones, in place, where that is faster; one by one,
    so that no more than one stands in memory twice. Of a layer with norms behind attention and MLP only the
    linear maps are packed. The result can only decode and score: it has no gradients and no state dict to
    save."""
    for name, child in module.named_children():
        if isinstance(child, Block) and isinstance(child.after_mlp, nn.Identity):
            if packable(child.mlp.down.weight):
                setattr(module, name, PackedBlock(child))
        elif isinstance(child, nn.Linear):
            if packable(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack(child)
