"""Makes torchvision importable beside a torch of another build.

The package index serves its CUDA build also to a machine whose torch is for the CPU. The compiled part, box
operators that nothing here calls, does not load there, and every import of torchvision, of transformers or
timm with it, ends in "operator torchvision::nms does not exist": two are looked up, so two are declared.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch


@cache
def mend_torchvision() -> torch.library.Library | None:
    """Call before what imports transformers, torchvision or a library over it; takes 2 ms, and does nothing
    where the build fits. The declarations live as long as what is returned, which the cache keeps."""
    spec = importlib.util.find_spec("torchvision")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    compiled = next(folder.glob("_C.*"), None) if folder else None
    if compiled is None:
        return None
    try:
        torch.ops.load_library(str(compiled))
        return None
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
