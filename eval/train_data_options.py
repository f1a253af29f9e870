"""Options of generate_train_data and extract_code, named as in the published code where it has them. No
torch."""

from __future__ import annotations

import argparse

from eval.options import add_law_arguments, add_model_arguments, add_prompt_arguments
from eval.parser import at_least

DATA_DIR = "data/drafter_train_data"
IN_FLIGHT = 16


def add_shard_arguments(parser: argparse.ArgumentParser, output_dir: str) -> None:
    """Where the shards go and what they hold."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output_dir",
        default=output_dir,
        metavar="DIR",
        help="folder of the shards; a run that was stopped goes on there",
    )
    group.add_argument(
        "--shard_size",
        type=at_least(1),
        default=64,
        metavar="IMAGES",
        help="images a file; at most so many are lost by a kill",
    )
    group.add_argument(
        "--features",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the target's features too (Anole: 17 MB an image); else train_drafter computes them",
    )
    group.add_argument(
        "--config", metavar="FILE", help="flat YAML file of options; the command line wins (default: none)"
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of generate_train_data."""
    add_model_arguments(parser)
    parser.set_defaults(batch_size=IN_FLIGHT)
    add_prompt_arguments(parser, "configs/emoji_drafter_prompts.txt", -1)
    for name, dest in (("--data_path", "prompt"), ("--num_samples", "num_images")):
        parser.add_argument(
            name,
            dest=dest,
            type=at_least(1) if dest == "num_images" else str,
            default=argparse.SUPPRESS,
            metavar="PATH" if dest == "prompt" else "N",
            help=f"the published code's name of --{dest}",
        )
    add_law_arguments(parser, temperature=True)
    add_shard_arguments(parser, DATA_DIR)
