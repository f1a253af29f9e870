"""LlamaGen's VQ model (vq_ds16_t2i.pt, vq_ds16_c2i.pt): the layers of models.codecs.vq under other names.

Published facts: attention at the lowest resolution alone, codes looked up l2-normalised, pixels rounded. The
file comes without a configuration: the shapes of its tensors say everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from adt_tree.errors import CheckpointError, reason
from models.checkpoint.meta_init import build, expected, on_meta, require
from models.checkpoint.weights import read_weights
from models.codecs.vq import VQConfig, VQModel

LOWEST = 16  # cells along the side of the smallest published image; VQConfig names levels by their sides
MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}


def vq_config(shapes: Mapping[str, tuple[int, ...]]) -> VQConfig:
    """The model whose tensors have these shapes. KeyError names a missing one, ValueError a wrong size."""
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
        resolution=LOWEST << (len(widths) - 1),
        attn_resolutions=(LOWEST,),
        rounds=True,
        normalises=True,
    )


def janus_names(config: VQConfig) -> dict[str, str]:
    """Our names of a VQModel's tensors -> Janus', whose decoder counts levels from the lowest."""
    last = len(config.channel_multiplier) - 1
    return {
        name: re.sub(r"\.up\.(\d+)\.", lambda found: f".up.{last - int(found[1])}.", name)
        for name in on_meta(lambda: VQModel(config)).state_dict()
    }


def published_names(config: VQConfig) -> dict[str, str]:
    """Our names of a VQModel's tensors -> the file's, whose levels are as Janus'."""
    names = janus_names(config)
    for ours, name in names.items():
        name = re.sub(r"\.mid\.(\w+)\.", lambda found: f".mid.{MIDDLE[found[1]]}.", name)
        name = re.sub(r"\.(down|up)\.", ".conv_blocks.", name)
        names[ours] = re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)
    return names


def read_vq16(path: Path, device: torch.device) -> VQModel:
    """The codec, fp32. CheckpointError says what is wrong with the file."""
    state = read_weights(path)
    try:
        config = vq_config(state.shapes)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} holds no VQ model of LlamaGen ({reason(error)}): give vq_ds16_t2i.pt or vq_ds16_c2i.pt"
        ) from None
    names = published_names(config)
    wanted = expected(lambda: VQModel(config), lambda own: {names[name]: own[name] for name in own})
    require(path, state, wanted, "fetch it again")
    return build(lambda: VQModel(config), state.placed(device, torch.float32).renamed(names), path)
