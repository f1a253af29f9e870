"""Layers as the CPU runs them fastest: weights in oneDNN's blocked layout; norms, the MLP's gate and residual
sums fused into the products.

A pass has a few rows up to some hundreds. For so few, torch's own product spends its time on packing the
weights, anew every time; here they are packed once. Between the products the time goes into small operations
and the interpreter, so a layer is one straight line. The function stays the same up to rounding: bf16 weights
multiply bf16 rows, norms and attention are fp32.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from models.cache import AttentionMetadata
from models.transformer import (
    QK_NORM_EPS,
    Attention,
    Block,
    Decoder,
    as_pairs,
    attend_causally,
)

ROWS = 64  # a hint for the layout; from 2 to some hundreds of rows oneDNN chooses the same one


def packable(weight: Tensor) -> bool:
    """Whether products with the weight gain: fp32 or bf16 on a CPU whose torch has oneDNN, which multiplies
    bf16 from AVX-512 on."""
    plain = weight.device.type == "cpu" and weight.layout == torch.strided
    if not (plain and torch.backends.mkldnn.is_available()):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Of the keys and values of layers with such weights. Packed ones attend in fp32: SDPA on a CPU reads the
    cache of a plain step several times faster so, although there is twice as much of it (docs/LOG.md)."""
    return torch.float32 if packable(weight) else weight.dtype


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


def row_invariant(decoder: Decoder) -> bool:
    """Whether a row's product with the weights of a layer and the head is the same, bit for bit, whatever
    rows are beside it: measured on this machine, for passes of 1 to 64 rows."""
    modules = (*decoder.blocks[0].modules(), *decoder.head.modules())
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    if not all(packable(weight) for weight in weights):
        return False
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        product, x = Product(weight), torch.randn(ROWS, weight.shape[1], generator=generator)
        x = x.to(weight.dtype)
        whole = product(x)
        if not all(torch.equal(product(x[:rows]), whole[:rows]) for rows in (1, 2, 3, 8, 31)):
            return False
    return True


class PackedLinear(nn.Module):
    """A Product where a module has to stand."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack weight [out, D] with bias [out]."""
        super().__init__()
        self.product = Product(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., out]."""
        return self.product(x)


class RowNorm:
    """What is left of nn.RMSNorm, seven small steps on a CPU, once its scale is in what stands behind it:
    x / sqrt(sum(x^2) + D eps), in three. Of nn.LayerNorm as well, where rows have a mean of 0."""

    __slots__ = ("least",)

    def __init__(self, width: int, eps: float) -> None:
        """width: D."""
        self.least = torch.tensor((width * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [..., D] of length 1, or less where eps is not negligible; fp32 within."""
        wide = x.float()
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self.least)
        return (wide / length).to(x.dtype)


def taken(norm: nn.RMSNorm) -> tuple[RowNorm, Tensor]:
    """A norm in two: the rows, and their scale [D], with the root of their width."""
    assert norm.eps is not None, "a decoder's configuration names it"
    width = norm.weight.numel()
    return RowNorm(width, norm.eps), norm.weight.detach().float() * width**0.5


class PackedHeads:
    """transformer.split_heads in few steps: queries and keys stay where the product wrote them."""

    __slots__ = ("heads", "kv_heads", "norm", "product", "scale", "shift")

    def __init__(self, attention: Attention, before: Tensor) -> None:
        """before [D] or []: the scale of what the product takes."""
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        weight = attention.qkv.weight.detach().float() * before
        self.norm = None
        if attention.affine is not None:
            # What the norm of a head would take off, its mean, never comes out of the product.
            normed = weight.unflatten(0, (self.heads + 2 * self.kv_heads, -1))[: self.heads + self.kv_heads]
            normed -= normed.mean(dim=1, keepdim=True)
            self.norm = RowNorm(attention.head_dim, QK_NORM_EPS)
            scale, self.shift = (part.detach().float() for part in attention.affine)
            self.scale = scale * attention.head_dim**0.5
        self.product = Product(weight.to(attention.qkv.weight.dtype))

    def __call__(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [..., H, E], keys and values [..., 2 * Hkv, E] of x [..., D], fp32, as views of one
        product."""
        fused = self.product(x).float()
        fused = fused.view(*fused.shape[:-1], self.heads + 2 * self.kv_heads, -1)
        qk = turned = fused.narrow(-2, 0, self.heads + self.kv_heads)
        if self.norm is not None:
            turned = torch.addcmul(self.shift, self.norm(qk), self.scale)
        torch.mul(as_pairs(turned), turn, out=as_pairs(qk))
        return fused.narrow(-2, 0, self.heads), fused.narrow(-2, self.heads, 2 * self.kv_heads)


class PackedBlock(nn.Module):
    """A Block's layer in as few steps as it takes on a CPU."""

    def __init__(self, block: Block) -> None:
        """block is taken apart: no product of it is there twice for longer than it takes to pack."""
        super().__init__()
        mlp, norm = block.mlp, block.attention_norm
        self.attention_norm, before = None, torch.ones(())
        if isinstance(norm, nn.RMSNorm):
            self.attention_norm, before = taken(norm)
        self.mlp_norm, behind = taken(block.mlp_norm)
        self.heads = PackedHeads(block.attention, before)
        self.out = Product(block.attention.out.weight)
        del block.attention
        gate, up = mlp.gate_up.weight.chunk(2)
        self.gate, self.up = (Product((part.detach() * behind).to(part.dtype)) for part in (gate, up))
        del mlp.gate_up, gate, up
        self.down = Product(mlp.down.weight)

    def forward(self, x: Tensor, turn: Tensor, store: Tensor, meta: AttentionMetadata) -> Tensor:
        """As Block.forward."""
        return self._merge(x, meta.attend(store, *self._project(x, turn)))

    def causal(self, x: Tensor, turn: Tensor) -> Tensor:
        """The same layer over whole sequences, without a cache."""
        return self._merge(x, attend_causally(*self._project(x, turn)))

    def _project(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        return self.heads(normed, turn)

    def _merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input and what its heads read."""
        x = self.out.plus(mixed.to(x.dtype), x)
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


def unpacked(module: nn.Module) -> nn.Module:
    """Returns the function of a head, packed or not, as a module that gradients flow through. Packing the
    head later does not reach it."""
    if isinstance(module, nn.Sequential):
        return nn.Sequential(*map(unpacked, module))
    if not isinstance(module, PackedLinear):
        return module
    weight, bias = module.product.weight.to_dense(), module.product.bias
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
