"""Where published weights come from: a local path, a hub id, or the address of their authors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from adt_tree.errors import CheckpointError, UserError, reason
from models.checkpoint.hub import HubId, locate

CLIP_CONFIG = "open_clip_config.json"
CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # the first there is


def weights_file(text: str, option: str) -> Path:
    """A local file of weights, fetched if text is a hub id OWNER/NAME/FILE or an https address.

    Downloads lie where torch.hub keeps them; a hash in the file's name is checked. UserError names option.
    """
    try:
        path = _download(text) if text.startswith("https://") else locate(text)
    except CheckpointError as error:
        raise UserError(f"{option}: {error}") from None
    if not path.is_file():
        raise UserError(f"{option} {text}: it is no file of weights; give the file itself")
    return path


def _download(address: str) -> Path:
    name = address.rsplit("/", 1)[1]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.is_file():
        mark = re.search(r"-([a-f0-9]{8,})\.", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(address, str(path), mark[1] if mark else None)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{address} cannot be fetched ({reason(error)}); fetch it elsewhere and give the local file"
            ) from None
    return path


def clip_config(text: str, option: str) -> Path:
    """open_clip_config.json of a folder, of a hub repository, or beside a file of weights."""
    return _first(text, (CLIP_CONFIG,), option)


def clip_weights(text: str, option: str) -> Path:
    """The weights in a folder or a hub repository of open_clip's layout, or the file itself."""
    return Path(text) if Path(text).is_file() else _first(text, CLIP_WEIGHTS, option)


def _first(text: str, names: Sequence[str], option: str) -> Path:
    """The first of the named files that a folder or a hub repository holds. UserError if it holds none."""
    path, fault = Path(text), f"{text} holds no {' or '.join(names)}"
    local = path.exists() or HubId.read(text) is None
    folder = path.parent if path.is_file() else path
    for name in names:
        try:
            file = folder / name if local else locate(f"{text}/{name}")
        except CheckpointError as error:
            fault = str(error)
        else:
            if file.is_file():
                return file
    raise UserError(f"{option}: {fault}; give a folder that has it")
