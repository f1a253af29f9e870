"""train_emoji: the embedded model, stage by stage; training/emoji/ has the options and work of each."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from cli.options import Parser

STAGES = {
    "data": "fetch and rasterise the emoji sets, write captions",
    "tokenizer": "train the VQ tokenizer",
    "bpe": "train the text vocabulary",
    "target": "train the target",
    "restore": "put an exported checkpoint back, to train it further",
    "measure": "figures of the tokenizer and the target on pictures never trained on",
    "prompts": "write prompts for the drafter's data",
    "export": "write the checkpoint and its model card",
    "contact": "make the contact sheet of trained and held-out prompts",
    "recognise": "how often a picture's nearest original has the right name",
}


def run(stage: str, argv: Sequence[str]) -> None:
    """Parse and run one stage."""
    module = import_module(f"training.emoji.{stage}")
    parser = Parser(f"main.py train_emoji {stage}", STAGES[stage])
    parser.formatter_class = ArgumentDefaultsHelpFormatter
    module.add_arguments(parser)
    module.run(parser.parse(argv))
