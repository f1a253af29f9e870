"""Numbers the host knows -> the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """An int64 tensor of the values.

    From ordinary memory the copy to a CUDA device would wait for all that is queued there; from pinned memory
    it takes its turn behind it, and the host goes on.
    """
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
