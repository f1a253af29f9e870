"""Loads LlamaGen's VQ model (vq_ds16_t2i.pt, vq_ds16_c2i.pt), which has the layers of models.codecs.vq.

As published, it has attention only at the lowest resolution, looks codes up l2-normalised and rounds pixels
to 8 bits. The files have no configuration, so it is derived from the shapes of their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module, on_meta
from models.checkpoint.weights import read_weights
from models.codecs.vq import VQConfig, VQModel

GRID_SIDE = 16  # cells along a side of the smallest published image; attn_resolutions names that level
MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}


def vq_config(shapes: Mapping[str, tuple[int, ...]]) -> VQConfig:
    """Returns the configuration of the model whose tensors have these shapes. KeyError names a missing
    tensor, ValueError a wrong size."""
    channels = shapes["encoder.conv_in.weight"][0]
    widths: list[int] = []
    while (name := f"encoder.conv_blocks.{len(widths)}.res.0.conv1.weight") in shapes:
        widths.append(shapes[name][0])
    if not widths:
        raise KeyError(name)
    blocks = 0
    while f"encoder.conv_blocks.0.res.{blocks}.conv1.weight" in shapes:
        blocks += 1
    codes, embed_dim = shapes["quantize.embedding.weight"]
    return VQConfig(
        base_channels=channels,
        channel_multiplier=tuple(width // channels for width in widths),
        num_res_blocks=blocks,
        embed_dim=embed_dim,
        latent_channels=shapes["post_quant_conv.weight"][0],
        num_embeddings=codes,
        resolution=GRID_SIDE << (len(widths) - 1),
        attn_resolutions=(GRID_SIDE,),
        rounds=True,
        normalises=True,
    )


def janus_names(config: VQConfig) -> dict[str, str]:
    """Maps our names of a VQModel's tensors to those of Janus-Pro, which numbers the levels of the decoder
    from the lowest resolution."""
    last = len(config.channel_multiplier) - 1
    return {
        name: re.sub(r"\.up\.(\d+)\.", lambda match: f".up.{last - int(match[1])}.", name)
        for name in on_meta(lambda: VQModel(config)).state_dict()
    }


def published_names(config: VQConfig) -> dict[str, str]:
    """Maps our names of a VQModel's tensors to those of LlamaGen's files, which number levels as Janus-Pro
    does."""
    names = janus_names(config)
    for ours, name in names.items():
        name = re.sub(r"\.mid\.(\w+)\.", lambda match: f".mid.{MIDDLE[match[1]]}.", name)
        name = re.sub(r"\.(down|up)\.", ".conv_blocks.", name)
        names[ours] = re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)
    return names


def read_vq16(path: Path, device: torch.device) -> VQModel:
    """Returns the codec in fp32. CheckpointError if the file is damaged or holds no VQ model of LlamaGen."""
    state = read_weights(path)
    with reading(path, "give LlamaGen's vq_ds16_t2i.pt or vq_ds16_c2i.pt"):
        config = vq_config(state.shapes)
    names, placed = published_names(config), state.placed(device, torch.float32)
    return load_module(lambda: VQModel(config), placed, path, lambda stored: stored.renamed(names))
