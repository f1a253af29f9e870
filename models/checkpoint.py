"""What a checkpoint folder holds beside weights (models.weights): configuration and tokenizer; and modules
made from all of them. Whatever is wrong is a CheckpointError of one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.errors import CheckpointError, reason
from models.skeleton import skeleton


def build(
    make: Callable[[], nn.Module],
    weights: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device | None,
    folder: Path,
) -> Any:
    """Make a module without memory and hand it the weights, which take the place of its parameters.

    weights: tensors by our names, best read to that device and type already (Weights.placed): then nothing is
    copied once more. device: None leaves each where it is. CheckpointError if they do not fit or do not go
    in.
    """
    module = skeleton(make)
    try:
        state = {name: tensor.to(device or tensor.device, dtype) for name, tensor in weights().items()}
        module.load_state_dict(state, assign=True)
    except KeyError as error:
        raise CheckpointError(
            f"{folder}: tensor {error.args[0]} is missing: the checkpoint is incomplete"
        ) from None
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise CheckpointError(
                f"{folder}: no room for the weights on {device} as {dtype}: choose a smaller --precision or "
                "another --device"
            ) from None
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {lines[0]}") from None
    return module.requires_grad_(False).eval()


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json of a checkpoint folder, or its counterpart of another name."""
    path = folder / name
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file: give the folder of a checkpoint (a .pt is --model llamagen's)"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: give the folder of a checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return config


def read_fields(folder: Path, read: Callable[[], Any]) -> Any:
    """What read makes of config.json; a field that is missing or senseless is a CheckpointError."""
    try:
        return read()
    except KeyError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {reason(error)}") from None


def read_tokenizer(*folders: Path) -> Tokenizer:
    """text_tokenizer.json, or tokenizer.json, of the first folder that has one."""
    for path in (folder / name for folder in folders for name in ("text_tokenizer.json", "tokenizer.json")):
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises bare Exception
                raise CheckpointError(f"{path} is not a tokenizer ({reason(error)})") from None
    raise CheckpointError(f"{folders[0]} holds no text_tokenizer.json and no tokenizer.json")
