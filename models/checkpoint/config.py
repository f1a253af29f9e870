"""Reads config.json, checking every field, and the tokenizer of a checkpoint folder. No torch.

The functions that read one field raise KeyError if it is missing and ValueError if it makes no sense. Call
them under `models.checkpoint.files.reading`, which turns both into a CheckpointError that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from adt_tree.errors import CheckpointError, shown
from models.checkpoint.files import read_json, reading

# Largest integers that are accepted: in general, and for fields that say how many modules or rows are built.
# A damaged config.json with a larger one would be noticed only after hours or terabytes of building, when the
# shapes are compared with the tensors of the file.
LARGEST = 1 << 22
LARGEST_OF = {
    "num_hidden_layers": 1 << 10,
    "num_res_blocks": 1 << 6,
    "channel_multiplier": 1 << 6,
    "in_channels": 4,
    "max_position_embeddings": 1 << 20,
    "block_size": 1 << 20,
    "cls_token_num": 1 << 20,
}
LONGEST_LIST = 16
ADAPTER = "holds an adapter (LoRA): merge it into its model first (merge_and_unload of peft)"


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns config.json of a checkpoint folder, or another of its JSON files.

    Raises CheckpointError if the file is missing, damaged or not an object, if the folder holds an adapter,
    and if its weights are quantised.
    """
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: give a checkpoint's folder (only llamagen takes a .pt)")
    path, remedy = folder / name, "give the folder of a checkpoint, or fetch it again"
    if not path.exists() and (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder} {ADAPTER}")
    config = read_json(path, remedy)
    with reading(path, remedy):
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
    refuse_quantised(config, folder)
    return config


def refuse_quantised(config: Mapping[str, Any], source: object) -> None:
    """Raises CheckpointError, which names `source`, if a config.json says that its weights are quantised."""
    for name in ("quantization_config", "quantization"):  # the second is MLX's
        if fields := config.get(name):
            method = fields.get("quant_method", name) if isinstance(fields, Mapping) else shown(fields)
            raise CheckpointError(
                f"{source}: quantised by {getattr(method, 'value', method)}: not supported; give the weights "
                "in bf16, fp16 or fp32"
            )


def read_tokenizer(*folders: Path) -> Tokenizer:
    """Returns text_tokenizer.json, or else tokenizer.json, of the first folder that has one of them.

    Raises CheckpointError if no folder has one, or if it is damaged.
    """
    names = ("text_tokenizer.json", "tokenizer.json")
    path = next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folders[0]} holds no {' and no '.join(names)}: fetch the text files too")
    with reading(path):
        tokenizer = Tokenizer.from_file(str(path))
    return tokenizer


def control_tokens(added: Iterable[AddedToken]) -> tuple[str, ...]:
    """Returns the texts, among the added tokens of a tokenizer, that are no ordinary words: special ones, and
    ones in angle brackets. Some tokenizers also add letters, such as an umlaut."""
    texts = ((token.content, token.special) for token in added)
    return tuple(text for text, special in texts if special or (text[:1], text[-1:]) == ("<", ">"))


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Returns the value of a field that must be an integer from `least` to the largest of that name."""
    most = LARGEST_OF.get(name, LARGEST)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}: it must be a whole number from {least} to {most}")
    return value


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a field that is an integer of 1 or more. A default, if there is one, replaces null."""
    if default is not None and fields.get(name) is None:
        return default
    return check_integer(name, fields[name])


def integers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns a field that is a list of integers of 1 or more; () if it is absent or null."""
    values = fields.get(name)
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or len(values) > LONGEST_LIST:
        raise ValueError(f"{name} is {shown(values)}: it must be a short list of whole numbers")
    return tuple(check_integer(name, value) for value in values)


def positive(fields: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a field that is a positive, finite number; the default if it is absent or null."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(value)}: it must be a positive number")
    return value


def section(fields: Mapping[str, Any], name: str, required: bool = False) -> Mapping[str, Any]:
    """Returns a field that is a JSON object. If it is absent or null: {}, or KeyError if it is required."""
    value = fields.get(name) or {}
    if required and not value:
        raise KeyError(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}: it must be a JSON object")
    return value
