"""train_emoji: the embedded model, stage by stage; training/ has the options and work of each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from cli.options import Parser

STAGES = {
    "data": "fetch and rasterise the emoji sets, write captions",
    "tokenizer": "train the VQ tokenizer",
    "bpe": "train the text vocabulary",
    "target": "train the target",
    "prompts": "write prompts for the drafter's data: things it knows and mixtures",
    "export": "write the checkpoint and its model card",
    "contact": "make the contact sheet of seen and held-out prompts",
}


def run(stage: str, argv: Sequence[str]) -> None:
    """Parse and run one stage."""
    module = import_module(f"training.{stage}")
    parser = Parser(f"main.py train_emoji {stage}", STAGES[stage])
    module.add_arguments(parser)
    module.run(parser.parse(argv))
