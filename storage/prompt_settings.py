"""Where the prompts of a run are from, and which of them it takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from storage.command_line import declare, option

PROMPT_DIR = "data/prompts"
CAPTIONS = ("first", "longest", "all")  # which captions of a COCO image are prompts; the first is the default
DEFAULT_END = 10000  # of end_idx, as published


def image_count(text: str) -> int:
    """Reads a number of images: positive, or -1 for all."""
    if text == "-1" or (text.isdecimal() and int(text)):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} images: give a positive number, or -1 for all")


def _window(text: str) -> str:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not START-END with START < END, such as 0-100")
    return text


def _class_labels(text: str) -> tuple[int, ...]:
    labels = [word.strip() for word in text.split(",")]
    if not all(label.isascii() and label.isdigit() for label in labels):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of class ids such as 207,360")
    return tuple(map(int, labels))


@declare("prompts", {"seeds": "images_per_prompt"})
class PromptSettings:
    """The prompts of a run."""

    prompt: str | None = option(
        "a text, repeated --num_images times with different seeds; a .txt file, one prompt per line; a .tsv, "
        ".csv, .json or .jsonl file with keys Prompt, Caption or Text, and perhaps Name or Id, the image's "
        "name (so GenEval's evaluation_metadata.jsonl); a folder of .txt files, as DPG-Bench's; or one "
        "of PartiPrompts, MSCOCO2017Val, MSCOCO2014Val, MSCOCO2017Train, SJDPrompts in --prompt_dir "
        "(default: prompts of the embedded model in configs/)",
        unit="TEXT",
    )
    class_labels: tuple[int, ...] | None = option(
        "classes such as 207,360 instead of prompts, for LlamaGen's class-conditional checkpoints",
        unit="IDS",
        read=_class_labels,
    )
    prompt_dir: str = option("folder of the named prompt sets", PROMPT_DIR, unit="DIR")
    captions: str | None = option(
        "of COCO annotations, take the first or the longest caption of each image, or all (default: "
        f"{CAPTIONS[0]})",
        choices=CAPTIONS,
    )
    num_images: int = option(
        "number of prompts used; if there are more, --random_seed selects a random subset; -1: all prompts",
        10,
        unit="N",
        read=image_count,
    )
    images_per_prompt: int = option(
        "images of every prompt, each with its own seed: NAME, NAME.1, ...; GenEval and DPG-Bench ask for 4",
        1,
        unit="IMAGES",
        least=1,
        most=10_000,
    )
    slice: str | None = option(
        "rows of the list from START up to END, exclusive; taken before --num_images, and this before "
        "--start_idx and --end_idx (default: all)",
        unit="START-END",
        read=_window,
    )
    start_idx: int = option("first row of the selected prompts", 0, unit="ROW", least=0)
    end_idx: int | None = option(
        "row after the last of the selected prompts; more prompts than the default are refused unless this "
        f"is given (default: {DEFAULT_END})",
        unit="ROW",
        least=1,
    )
    random_seed: int = option(
        "seed of the run; the seed of an image is a hash of it and of the image's name",
        42,
        unit="SEED",
    )

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Returns the settings among the stored options of a run. KeyError if one is missing."""
        return cls(**{item.name: stored[item.name] for item in fields(cls)})
