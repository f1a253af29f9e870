"""What a checkpoint folder holds beside weights: config.json and a tokenizer. Whatever is wrong is a
CheckpointError of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.errors import CheckpointError, reason


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
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
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
