"""A model out of its files: the decoder and the drafter, beside what a family has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from adt_tree.grid import Grid
from models.checkpoint.meta_init import build
from models.checkpoint.weights import Weights
from models.codecs.vq import VQModel
from models.drafter import Layout, load_drafter
from models.errors import CheckpointError
from models.model import Model
from models.spec import Checkpoint
from models.target import PromptEncoder
from models.transformer import Decoder, DecoderConfig


def load_networks(
    checkpoint: Checkpoint,
    shape: DecoderConfig,
    weights: Weights,
    to_ours: Callable[[Weights], Mapping[str, Tensor]],
    layout: Layout,
    grid: Grid,
    prompts: PromptEncoder,
    codec: VQModel,
    row_end: int | None = None,
) -> Model:
    """The model that draws this grid from these prompts: its decoder of that shape and, if it is wanted, its
    drafter are read.

    weights: by published names; to_ours makes a Decoder's state dict of them. The drafter goes first: it is
    small, so what is wrong with it is known before the target is read. CheckpointError if one does not fit.
    """
    dtype, device = checkpoint.dtype, checkpoint.device
    if codec.config.num_embeddings != prompts.num_codes:
        raise CheckpointError(
            f"{checkpoint.folder}: {prompts.num_codes} codes, the VQ decoder has "
            f"{codec.config.num_embeddings}: they belong to different models"
        )
    net, drafter_sha = None, None
    if checkpoint.drafter is not None:
        net, drafter_sha = load_drafter(checkpoint.drafter, shape, dtype, device, layout)
    placed = weights.placed(device, dtype)
    decoder = build(lambda: Decoder(shape), lambda: to_ours(placed), dtype, device, checkpoint.folder)
    return Model(
        spec=checkpoint.spec,
        grid=grid,
        prompts=prompts,
        decoder=decoder,
        codec=codec,
        drafter_net=net,
        weights_sha=placed.digest(),
        drafter_sha=drafter_sha,
        drafter_layout=layout,
        row_end=row_end,
        tables=checkpoint.tables,
    )
