"""What a checkpoint folder holds beside weights: a tokenizer, and config.json, each field of which is checked
as it is read: of the right kind, and of a size that can exist.

A size that nobody ships would otherwise build for hours or ask for terabytes before any tensor is compared.
KeyError names a field that is missing, ValueError one that makes no sense; read_fields puts the file's name
before either. Whatever else is wrong is a CheckpointError of one line. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adt_tree.errors import CheckpointError, reason

MOST_LAYERS = 1 << 10
MOST_WIDTH = 1 << 18
MOST_TOKENS = 1 << 22
MOST_POSITIONS = 1 << 20
MOST_PIXELS = 1 << 13  # along the side of an image


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


def check_whole(name: str, value: Any, most: int, least: int = 1) -> int:
    """The value, a whole number from least to most."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}: it must be a whole number from {least} to {most}")
    return value


def whole(fields: Mapping[str, Any], name: str, most: int, default: int | None = None) -> int:
    """A field that is a whole number from 1 to most; default, if given, where it is left out or null."""
    if default is not None and fields.get(name) is None:
        return default
    return check_whole(name, fields[name], most)


def wholes(fields: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    """A field that is a list of whole numbers from 1 to most; empty where it is left out or null."""
    values = fields.get(name)
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or len(values) > 16:
        raise ValueError(f"{name} is {shown(values)}: it must be a short list of whole numbers")
    return tuple(check_whole(name, value, most) for value in values)


def positive(fields: Mapping[str, Any], name: str, default: float) -> float:
    """A field that is a positive number, not infinite; default where it is left out or null."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(value)}: it must be a positive number")
    return value


def section(fields: Mapping[str, Any], name: str, required: bool = False) -> Mapping[str, Any]:
    """A field that is a table of fields; empty where it is left out or null, unless it is required."""
    value = fields.get(name) or {}
    if required and not value:
        raise KeyError(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}: it must be a table of fields")
    return value


def shown(value: Any) -> str:
    """A value of a file for a message: on one line, and short."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
