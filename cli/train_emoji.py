"""train_emoji: builds the embedded model in stages. A stage is a module of recipes/emoji with Options and
run(options)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

STAGES = {
    "data": "fetch and rasterise the emoji sets, write captions",
    "tokenizer": "train the VQ tokenizer",
    "bpe": "train the text vocabulary",
    "target": "train the target",
    "restore": "put an exported checkpoint back into a work folder, to measure it or to train it further",
    "measure": "measure the tokenizer and the target on pictures they were not trained on",
    "recognise": "measure how often a picture's nearest original has the right name",
    "prompts": "write the prompt files of tables, constants, contact sheet and drafter's data",
    "export": "write the checkpoint",
}


def stage_of(name: str) -> ModuleType:
    """Returns the module of a stage."""
    return import_module(f"recipes.emoji.{name}")


def run(name: str, argv: Sequence[str]) -> None:
    """Parses and runs one stage."""
    stage = stage_of(name)
    stage.run(stage.Options.parse(argv, f"main.py train_emoji {name}", STAGES[name]))
