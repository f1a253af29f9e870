"""Options of reliability. No torch here."""

from __future__ import annotations

import argparse

from eval.bench_options import ARMS, BOUNDS, LANTERN_DELTA, LANTERN_K, arm_methods
from eval.errors import UserError
from eval.method import Method
from eval.options import (
    add_adapt_arguments,
    add_lantern_arguments,
    add_law_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_run_arguments,
    add_tree_arguments,
)

DRAFTING = tuple(arm for arm in ARMS if arm not in ("ar", *BOUNDS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of reliability."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, "configs/emoji_held_out.txt", 8)
    add_law_arguments(parser, temperature=True)
    group = parser.add_argument_group("arms")
    group.add_argument(
        "--arms",
        nargs="+",
        choices=DRAFTING,
        default=["eagle2", "jacobi", "hybrid"],
        help="whose drafts to record; bench --help says what they are (default: eagle2 jacobi hybrid)",
    )
    add_lantern_arguments(
        parser, switch=False, delta=LANTERN_DELTA, k=f"{LANTERN_K}, or an eighth of a smaller codebook"
    )
    add_tree_arguments(parser)
    add_adapt_arguments(parser)
    add_run_arguments(parser, "runs/reliability")


def recorded_methods(args: argparse.Namespace) -> list[tuple[str, Method]]:
    """(arm, method) of every arm, as bench has it. UserError for what cannot be, or would do nothing.

    The coupled rule alone: a confidence says how often a code is the coupled choice.
    """
    if args.verify == "rejection":
        raise UserError(
            "--verify rejection: a confidence is a rate of acceptance under the coupled rule alone; "
            "leave it out"
        )
    methods = arm_methods(argparse.Namespace(**vars(args), temperatures=[args.temperature]))
    return [(name, method) for name, method in methods if method.drafting]
