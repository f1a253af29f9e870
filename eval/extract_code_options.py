"""Options of extract_code. No torch."""

from __future__ import annotations

import argparse

from eval.options import add_model_arguments
from eval.parser import at_least
from eval.train_data_options import IN_FLIGHT, add_shard_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of extract_code."""
    add_model_arguments(parser)
    parser.set_defaults(batch_size=IN_FLIGHT)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data_path",
        default="data/laion_coco",
        metavar="DIR",
        help="pictures X.jpg, X.jpeg, X.png or X.webp with their captions X.txt, in folders below it too",
    )
    group.add_argument(
        "--num_samples",
        type=at_least(1),
        default=1_000_000,
        metavar="N",
        help="pictures, drawn with seed 42 from more",
    )
    add_shard_arguments(parser, "data/extracted_code")
