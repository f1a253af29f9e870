"""Makes a new drafter for a target, and writes a drafter's files as --drafter_path loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint.config import read_config
from models.checkpoint.files import reading, replacing, write_json
from models.drafter import DrafterNet, shape_conflict
from models.llama_names import drafter_names, scatter
from models.model import Model


def default_fields(model: Model) -> dict[str, Any]:
    """Returns config.json of a drafter whose layer has the shape of the target's."""
    return model.drafter_layout.fields(model.decoder.config)


def read_fields_of(path: Path, model: Model) -> dict[str, Any]:
    """Returns the user's config.json of a drafter. Raises CheckpointError if it does not fit the target."""
    fields = read_config(path.parent, path.name)
    with reading(path, "give a drafter's config.json for this target as config_path"):
        if fault := shape_conflict(model.drafter_layout.config(fields), model.decoder.config):
            raise ValueError(fault)
    return fields


def new_drafter(fields: Mapping[str, Any], model: Model) -> DrafterNet:
    """Returns an untrained drafter in fp32 that predicts each feature to equal the one before.

    It has the target's token embedding. Its layer has the weights of the target's last layer where the shapes
    agree, but its output matrices are zero, so the feature passes through unchanged. Training therefore
    begins from the target's distribution of the position before (docs/LOG.md).
    """
    net = DrafterNet(model.drafter_layout.config(fields), bool(fields.get("bias", True)))
    net.embed.load_state_dict(model.decoder.embed.state_dict())
    last, block = model.decoder.blocks[-1].state_dict(), net.block.state_dict()
    same = {name: last[name] for name in block if name in last and last[name].shape == block[name].shape}
    net.block.load_state_dict({**block, **same})
    with torch.no_grad():
        net.block.attention.out.weight.zero_()
        net.block.mlp.down.weight.zero_()
        # fc reads [token embedding, feature]: noise for the one, the identity for the other.
        half = net.config.hidden_size
        net.fc.weight[:, half:] = torch.eye(half)
        nn.init.normal_(net.fc.weight[:, :half], std=0.02)
        if net.fc.bias is not None:
            net.fc.bias.zero_()
    return net.float().to(model.codebook.device)


def write_drafter(folder: Path, fields: Mapping[str, Any], state: Mapping[str, Tensor], model: Model) -> None:
    """Writes config.json and model.safetensors (bf16) of the state of a DrafterNet into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.drafter_layout.config(fields)
    published = scatter(state, drafter_names(shape, "fc.bias" in state), shape)
    weights = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in published.items()}
    with replacing(folder / "model.safetensors") as part:
        save_file(weights, part, metadata={"format": "pt"})
    write_json(folder / "config.json", dict(fields))
