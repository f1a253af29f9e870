"""Weights in the layout the CPU multiplies fastest, oneDNN's blocked one; the MLP's gate fused into its
products.

A pass has a few rows up to some hundreds. For so few, torch's own product spends its time on packing the
weights, anew every time; here they are packed once. The function stays the same up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.transformer import MLP

ROWS = 64  # a hint for the layout; from 2 to some hundreds of rows oneDNN chooses the same one


def packable(weight: Tensor) -> bool:
    """Whether products with the weight gain: fp32 on a CPU whose torch has oneDNN."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.layout == torch.strided and torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """x W^T + b for x [..., D]; optionally with SiLU behind it, or times another factor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, D] is copied, bias [out] kept."""
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS))
        self.register_buffer("bias", bias)

    def __deepcopy__(self, memo: dict) -> PackedLinear:
        """Itself: what is packed is opaque, and never written."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """silu of the product."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times factor [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")


class PackedMLP(nn.Module):
    """See MLP."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        gate, up = mlp.gate_up.weight.chunk(2)
        self.gate, self.up, self.down = PackedLinear(gate), PackedLinear(up), PackedLinear(mlp.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """See MLP."""
        return self.down(self.up.times(x, self.gate.silu(x)))


class RowNorm(nn.Module):
    """See nn.RMSNorm, which takes seven small steps on a CPU where these are five."""

    weight: Tensor
    eps: Tensor

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight)
        self.register_buffer("eps", torch.tensor(norm.eps))

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        scale = torch.add(self.eps, x.square().sum(dim=-1, keepdim=True), alpha=1 / x.shape[-1])
        return (x * scale.rsqrt_()).mul_(self.weight)


def pack(module: nn.Module) -> None:
    """Replace a module's MLPs, linear layers and norms, in place, where that gains; layer by layer, so that
    no more than one is there twice. Decoding alone can use what is left: it has no gradients and no state
    dict to save."""
    for name, child in module.named_children():
        if isinstance(child, MLP) and packable(child.down.weight):
            setattr(module, name, PackedMLP(child))
        elif isinstance(child, nn.Linear) and packable(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        elif isinstance(child, nn.RMSNorm) and packable(child.weight):
            setattr(module, name, RowNorm(child))
        else:
            pack(child)


def product(weight: Tensor) -> nn.Module:
    """The module x -> x W^T of a weight [out, D], of which a copy is taken."""
    if packable(weight):
        return PackedLinear(weight)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear
