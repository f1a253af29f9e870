"""The two networks of a checkpoint: the target's decoder, on one device or several, and its drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from models.checkpoint.meta_init import build
from models.checkpoint.weights import Weights
from models.device_map import by_layer, share_out, spread
from models.drafter import DrafterNet, Layout, load_drafter
from models.spec import Checkpoint
from models.transformer import Decoder, DecoderConfig

LAYERS = "model.layers."  # published names of a layer's tensors go on with its number


@dataclass(frozen=True, slots=True)
class Networks:
    """Loaded, with the digests of their weights."""

    decoder: Decoder
    drafter: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None


def load_networks(
    checkpoint: Checkpoint,
    shape: DecoderConfig,
    weights: Weights,
    to_ours: Callable[[Weights], Mapping[str, Tensor]],
    layout: Layout,
) -> Networks:
    """Read a decoder of that shape and, if it is wanted, its drafter.

    weights: by published names; to_ours makes a Decoder's state dict of them. The drafter goes first: it is
    small, so what is wrong with it is known before the target is read. CheckpointError if one does not fit.
    """
    dtype, device = checkpoint.dtype, checkpoint.device
    net, drafter_sha = None, None
    if checkpoint.drafter is not None:
        net, drafter_sha = load_drafter(checkpoint.drafter, shape, dtype, device, layout)
    devices = share_out(shape, dtype) if checkpoint.split else []
    placed = weights.placed(by_layer(devices, LAYERS) if devices else device, dtype)
    home = None if devices else device
    decoder = build(lambda: Decoder(shape), lambda: to_ours(placed), dtype, home, checkpoint.folder)
    if devices:
        spread(decoder, devices)
    return Networks(decoder, net, placed.digest(), drafter_sha)
