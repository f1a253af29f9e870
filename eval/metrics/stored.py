"""Features of reference images, computed once and kept."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eval.errors import UserError
from eval.outputs import write_atomic

FEATURES, WEIGHTS = "features", "weights"


def write_features(path: Path, features: Tensor, weights: str) -> None:
    """Keep features [N, D] with the digest of the network that made them."""
    write_atomic(path, save({FEATURES: features.contiguous()}, {WEIGHTS: weights}))


def read_features(path: Path, weights: str, count: int) -> Tensor:
    """The first count rows, all for -1. UserError if there are fewer, or another network made them."""
    try:
        with safe_open(path, framework="pt") as file:
            made_by, features = (file.metadata() or {}).get(WEIGHTS), file.get_tensor(FEATURES)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--fname_precalc {path}: cannot be read ({error}); delete it, it is made anew"
        ) from None
    if made_by != weights:
        raise UserError(
            f"--fname_precalc {path}: made by other weights ({made_by}); delete it, it is made anew"
        )
    if count > len(features):
        raise UserError(
            f"--num_samples {count}: --fname_precalc {path} holds {len(features)} rows; delete it"
        )
    return features if count < 0 else features[:count]
