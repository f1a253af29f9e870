"""Options that LlamaGen alone reads."""

from __future__ import annotations

import argparse


def class_labels(text: str) -> list[int]:
    """Class ids between commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of class ids such as 207,360")
    return [int(word) for word in words]


def add_family_arguments(parser: argparse.ArgumentParser) -> None:
    """How LlamaGen takes its prompts."""
    group = parser.add_argument_group("LlamaGen (--model llamagen: stage 1 and classes, llamagen2: stage 2)")
    group.add_argument(
        "--class_labels",
        type=class_labels,
        metavar="IDS",
        help="classes instead of prompts, such as 207,360, for a class-conditional checkpoint; a class names "
        "its image (default: none)",
    )
    group.add_argument(
        "--keep_text_encoder",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the text encoder in memory when all prompts are encoded; without it, its memory is given "
        "back before the first image",
    )
