"""Options of budget, and the tree shapes they span. No torch here."""

from __future__ import annotations

import argparse
from dataclasses import replace

from adt_tree.policy import CANDIDATES, CHAIN, TreeShape, self_drafted
from eval.errors import UserError
from eval.method import Method, check_drafter, check_model
from eval.options import (
    DRAFTERS,
    add_law_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_run_arguments,
)
from eval.parser import at_least

BUDGETS = (8, 16, 32, 64, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of budget."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, "configs/emoji_held_out.txt", 8)
    add_law_arguments(parser, temperature=True)
    group = parser.add_argument_group(
        "trees",
        "Fixed shapes. eagle: log2(budget) levels, and the least width that offers twice the budget to "
        "choose from; jacobi, hybrid: three quarters of the budget in the main chain, up to "
        f"{CHAIN} codes, half of larger budgets, and {CANDIDATES} candidates a cell.",
    )
    group.add_argument(
        "--budgets",
        nargs="+",
        type=at_least(1),
        default=list(BUDGETS),
        metavar="NODES",
        help="drafted nodes of a tree, root excluded",
    )
    group.add_argument(
        "--drafters",
        nargs="+",
        choices=DRAFTERS,
        default=list(DRAFTERS),
        help="who drafts, each at every budget",
    )
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warmup", type=at_least(0), default=1, metavar="IMAGES", help="images a point makes before timing"
    )
    add_run_arguments(parser, "runs/budget")


def shape_of(drafter: str, budget: int) -> TreeShape:
    """The fixed shape that spends a budget (>= 1) sensibly; the rules are in the options' help."""
    if drafter != "eagle":
        return self_drafted(budget)
    depth, width = max(1, budget.bit_length() - 1), 1
    while width + (depth - 1) * width**2 < 2 * budget:
        width += 1
    return TreeShape(depth, width, budget)


def lanes_of(args: argparse.Namespace) -> list[tuple[str, Method]]:
    """(label, method): plain decoding, then every drafter at every budget."""
    check_model(args)
    for name in ("budgets", "drafters"):
        values = getattr(args, name)
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise UserError(f"--{name}: {twice[0]} stands twice; give it once")
    plain = Method(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, cfg=args.cfg)
    found = [("ar", plain)] + [
        (label_of(drafter, budget), replace(plain, drafter=drafter, shape=shape_of(drafter, budget)))
        for drafter in args.drafters
        for budget in args.budgets
    ]
    check_drafter(args, (method for _, method in found))
    return found


def label_of(drafter: str, budget: int) -> str:
    """A point's name in tables."""
    return f"{drafter} n{budget}"
