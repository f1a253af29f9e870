"""The files of a checkpoint folder: configuration, weights, tokenizer. Whatever is wrong with them is a
CheckpointError of one line."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit; the message is one line that says what to do."""


def build(
    make: Callable[[], nn.Module],
    weights: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> Any:
    """Make a module without memory and hand it the weights, cast and moved one by one."""
    with torch.device("meta"):
        module = make()
    try:
        state = {name: tensor.to(device, dtype) for name, tensor in weights().items()}
        module.load_state_dict(state, assign=True)
    except KeyError as error:
        raise CheckpointError(
            f"{folder}: tensor {error.args[0]} is missing: the checkpoint is incomplete"
        ) from None
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {lines[0]}") from None
    return module.requires_grad_(False).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    path = folder / "config.json"
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
        raise CheckpointError(f"{folder / 'config.json'}: {_reason(error)}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: model.safetensors, its shards by their index, or pytorch_model.bin (weights
    only). Or of one file, which may keep them under "state_dict"."""
    if folder.is_file():
        state = _read_file(folder)
        return state.get("state_dict", state)  # type: ignore[return-value]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError):
            raise CheckpointError(f"{index} is not an index of safetensors shards: fetch it again") from None
    else:
        names = [n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()][:1]
    if not names:
        raise CheckpointError(f"{folder} holds no model.safetensors and no pytorch_model.bin")
    joined: dict[str, Tensor] = {}
    for name in names:
        joined.update(_read_file(folder / name))
    return joined


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: the index names it, fetch it again") from None
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({_reason(error)}): truncated or damaged, fetch it again"
        ) from None


def read_tokenizer(*folders: Path) -> Tokenizer:
    """text_tokenizer.json, or tokenizer.json, of the first folder that has one."""
    for path in (folder / name for folder in folders for name in ("text_tokenizer.json", "tokenizer.json")):
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises bare Exception
                raise CheckpointError(f"{path} is not a tokenizer ({_reason(error)})") from None
    raise CheckpointError(f"{folders[0]} holds no text_tokenizer.json and no tokenizer.json")


def digest_of(state: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes of the weights, first 16 digits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0].strip("'\"") if str(error) else type(error).__name__
