"""Reads config.json and the tokenizer of a checkpoint folder. No torch.

The functions that read one field raise KeyError if it is missing and ValueError if it makes no sense. Call
them under `models.checkpoint.files.reading`, which turns both into a CheckpointError that names the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from adt_tree.errors import CheckpointError, shown
from models.checkpoint.files import read_json, reading

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
    with reading(path, remedy):
        config = dict(read_json(path, remedy))
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


def integer(fields: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """Returns a field that is a whole number from `least` on. A default, if there is one, replaces null."""
    value = fields[name] if default is None else fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {shown(value)}: it must be a whole number from {least} on")
    return value


def integers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns a field that is a list of whole numbers from 1 on; () if it is absent or null."""
    return tuple(integer({name: value}, name) for value in fields.get(name) or ())


def number(fields: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a field that is a number; the default if it is absent or null."""
    value = fields.get(name)
    return default if value is None else float(value)


def section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a field that is a JSON object; {} if it is absent or null."""
    return dict(fields.get(name) or {})
