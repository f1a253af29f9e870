"""Options of throughput, and the methods it times. No torch here."""

from __future__ import annotations

import argparse
from dataclasses import replace

from eval.errors import UserError
from eval.families import SHAPE_OF, TAUS
from eval.method import Method, check_drafter, check_model
from eval.options import (
    AUTO,
    add_law_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_run_arguments,
)
from eval.parser import at_least

BATCHES = (1, 2, 4, 8, 16)
FIXED = "jacobi"  # self-drafted trees of the default shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of throughput."""
    add_model_arguments(parser, batch=False)
    add_prompt_arguments(parser, "configs/emoji_drafter_prompts.txt", 32)
    add_law_arguments(parser, temperature=True)
    group = parser.add_argument_group(
        "measuring",
        "At every batch size: plain decoding, self-drafting with its default trees, and --total_token auto "
        f"where what a tree's size gives is known ({', '.join(TAUS)}). A finished image leaves its slot to "
        "the next.",
    )
    group.add_argument(
        "--batch_sizes",
        nargs="+",
        type=at_least(1),
        default=list(BATCHES),
        metavar="IMAGES",
        help="images in flight at once",
    )
    group.add_argument(
        "--warmup", type=at_least(0), default=1, metavar="IMAGES", help="images a method makes before timing"
    )
    add_run_arguments(parser, "runs/throughput", graphs=True)


def methods_of(args: argparse.Namespace) -> list[tuple[str, Method]]:
    """(name, method): plain decoding and the default trees; the last of them, where sizes can be chosen, the
    method to size."""
    check_model(args)
    twice = [count for count in args.batch_sizes if args.batch_sizes.count(count) > 1]
    if twice:
        raise UserError(f"--batch_sizes: {twice[0]} stands twice; give it once")
    plain = Method(args.temperature, args.top_k, args.top_p, args.cfg)
    fixed = replace(plain, drafter="jacobi", shape=SHAPE_OF["jacobi"])
    check_drafter(args, (plain, fixed))
    return [("ar", plain), (FIXED, fixed), *([(AUTO, fixed)] if args.model in TAUS else [])]
