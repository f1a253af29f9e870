"""Where a Chameleon model's VQGAN comes from: the checkpoint itself, or Meta's vqgan.ckpt and vqgan.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.fields import section
from models.checkpoint.folder import read_fields
from models.checkpoint.meta_init import build
from models.checkpoint.weights import Weights, read_weights
from models.codecs.vq import VQConfig, VQModel
from models.errors import CheckpointError, reason

PREFIX = "model.vqmodel."
CODEBOOK = "quantize.embedding.weight"


def build_codec(
    shape: VQConfig, weights: Mapping[str, Tensor], device: torch.device, source: Path
) -> VQModel:
    """The codec of that shape, fp32, from weights by our names. CheckpointError names source if they do not
    fit."""
    return build(lambda: VQModel(shape), lambda: weights, torch.float32, device, source)


def read_codec(
    config: Mapping[str, Any],
    state: Weights,
    folder: Path,
    places: Sequence[Path],
    device: torch.device,
) -> VQModel:
    """The codec, fp32: from the checkpoint where it has a decoder (the embedded model), else from the first
    of `places` that holds vqgan.ckpt.

    config, state: those of the checkpoint in folder. CheckpointError if there is no decoder
    anywhere, or if the one found decodes another codebook.
    """
    stored = state.below(PREFIX)
    own = stored.placed(device, torch.float32)
    if any(name.startswith("decoder.") for name in own):
        shape = read_fields(folder, lambda: VQConfig.from_hf(section(config, "vq_config", required=True)))
        return build_codec(shape, own, device, folder)
    home = next((place for place in places if (place / "vqgan.ckpt").is_file()), None)
    if home is None:
        wanted = " or ".join(str(place) for place in places)
        raise CheckpointError(
            f"{folder} holds no VQ decoder ({PREFIX}decoder.*): put Meta's vqgan.ckpt and vqgan.yaml into "
            f"{wanted}, or say where they are by --tokenizer_base_path"
        )
    meta = read_weights(home / "vqgan.ckpt")
    if CODEBOOK in stored and CODEBOOK in meta:
        mine, theirs = stored[CODEBOOK].float(), meta[CODEBOOK].float()
        # The checkpoint's copy may be rounded to its own precision.
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, atol=1e-2, rtol=2e-2):
            raise CheckpointError(
                f"{home / 'vqgan.ckpt'}: its codebook is not that of {folder}: give this model's VQGAN"
            )
    return _from_meta(home, meta.placed(device, torch.float32), device)


def _from_meta(folder: Path, state: Weights, device: torch.device) -> VQModel:
    """The VQGAN as Meta published it; tensors of its training loss are left out."""
    path = folder / "vqgan.yaml"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: it belongs beside vqgan.ckpt, fetch both")
    try:
        shape = VQConfig.from_yaml(path)
    except Exception as error:  # yaml's errors, and whatever a file of another layout leads to
        raise CheckpointError(f"{path} does not describe a VQGAN ({reason(error)}): fetch it again") from None
    kept = state.renamed({name: name for name in state if not name.startswith("loss.")})
    return build_codec(shape, kept, device, folder / "vqgan.ckpt")
