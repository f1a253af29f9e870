"""The kernels that compute attention over a cache, and the choice among them.

Each is called directly, because the switches by which torch chooses one hold for the whole process, and so
for the models of other libraries too.

Dimensions: R rows, Hkv key/value heads, M query rows of a key/value head, C entries, E head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# query [R, Hkv, M, E], key and value [R, Hkv, C, E], additive mask [R, 1, M, C], scale -> [R, Hkv, M, E].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Computes attention by the kernel that torch chooses."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def memory_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Computes attention by CUDA's memory-efficient kernel, which takes all shapes and types alike."""
    mask = mask.expand(-1, query.shape[1], -1, -1)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, compute_log_sumexp=False, scale=scale)[0]


def cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Computes attention by cuDNN, in 16 bits. For every new shape it builds a plan, tens of milliseconds
    long. It takes a third to 0.6 of the memory-efficient kernel's time (docs/PERFORMANCE.md)."""
    mask = mask.expand(-1, query.shape[1], -1, -1)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(query, key, value, mask, compute_log_sumexp=False, scale=scale)[0]


def choose_kernel(device: torch.device, dtype: torch.dtype, few_shapes: bool, head_size: int = 128) -> Attend:
    """Returns the fastest kernel. few_shapes: passes are rounded up to few shapes, so that plans pay.
    head_size: cuDNN takes heads of more than 128 only on some cards."""
    if device.type != "cuda":
        return sdpa
    fits = dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(device) >= (8, 0)
    fits = fits and head_size <= 128
    return cudnn if few_shapes and fits and torch.backends.cudnn.is_available() else memory_efficient
