"""Options of sweep, and the grid of adaptive-tree constants they span. No torch here."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product

from adt_tree.policy import INITS, SELF_DRAFTED, AdaptConstants, TreeShape
from eval.errors import UserError
from eval.families import SHAPE_OF, constants_of, shape_of
from eval.method import Method, check_drafter, check_model
from eval.options import (
    ADAPT,
    DRAFTERS,
    add_law_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_run_arguments,
)
from eval.parser import at_least, within


def bounds(text: str) -> tuple[int, int, int]:
    """LOW:START:HIGH."""
    parts = text.split(":")
    if (
        len(parts) != 3
        or not all(part.isdigit() for part in parts)
        or not 1 <= int(parts[0]) <= int(parts[1]) <= int(parts[2])
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LOW:START:HIGH with 1 <= LOW <= START <= HIGH, such as 1:5:8"
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def _bounds(side: str) -> str:
    """The default bounds and start of a side for either kind of drafter."""
    eagle, own = (
        ":".join(str(getattr(constants, f"{side}_{end}")) for end in ("min", "start", "max"))
        for constants in (ADAPT, SELF_DRAFTED)
    )
    return f"{eagle}; jacobi, hybrid: {own}"


def _add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """The lists whose product is the grid."""
    group = parser.add_argument_group(
        "grid", "Every combination is a point; each option takes one or more values."
    )
    group.add_argument(
        "--betas", nargs="+", type=within(0, 1), default=[0.3, 0.5, 0.7], metavar="RATE", help="beta"
    )
    group.add_argument(
        "--step_depths", nargs="+", type=at_least(0), default=[1, 2], metavar="LEVELS", help="l_d"
    )
    group.add_argument(
        "--step_widths", nargs="+", type=at_least(0), default=[0, 1, 2], metavar="NODES", help="l_k"
    )
    group.add_argument(
        "--depths",
        nargs="+",
        type=bounds,
        metavar="LOW:START:HIGH",
        help=f"bounds and start of the depth, levels (default: {_bounds('depth')})",
    )
    group.add_argument(
        "--widths",
        nargs="+",
        type=bounds,
        metavar="LOW:START:HIGH",
        help=f"bounds and start of the width, nodes (default: {_bounds('width')})",
    )
    group.add_argument(
        "--budgets",
        nargs="+",
        type=at_least(1),
        metavar="NODES",
        help="drafted nodes of a tree, root excluded "
        f"(default: {ADAPT.budget}; jacobi, hybrid: {SELF_DRAFTED.budget})",
    )
    group.add_argument(
        "--inits",
        nargs="+",
        choices=INITS,
        default=[ADAPT.init],
        help="where a tree's state starts",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of sweep."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, "configs/emoji_prompts.txt", 8)
    add_law_arguments(parser, temperature=True)
    _add_grid_arguments(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--drafter_type",
        choices=DRAFTERS,
        default="eagle",
        help="who drafts; also whose defaults stand where the grid has none (default: eagle)",
    )
    group.add_argument(
        "--fixed_depths",
        nargs="+",
        type=at_least(1),
        metavar="LEVELS",
        help="fixed trees measured beside the grid, at every budget "
        f"(default: {', '.join(f'{kind} {SHAPE_OF[kind].depth}' for kind in DRAFTERS)})",
    )
    group.add_argument(
        "--fixed_widths",
        nargs="+",
        type=at_least(1),
        metavar="NODES",
        help=f"their widths (default: {', '.join(f'{kind} {SHAPE_OF[kind].width}' for kind in DRAFTERS)})",
    )
    group.add_argument(
        "--warmup", type=at_least(0), default=1, metavar="IMAGES", help="images a point makes before timing"
    )
    group.add_argument(
        "--top", type=at_least(1), default=20, metavar="ROWS", help="rows of the table; the JSON has all"
    )
    add_run_arguments(parser, "runs/sweep")


def points(args: argparse.Namespace) -> list[tuple[str, Method]]:
    """(label, method): plain decoding, the fixed trees, then the grid."""
    check_model(args)
    plain = Method(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, cfg=args.cfg)
    drafted = replace(plain, drafter=args.drafter_type)
    base, shape = constants_of(args), shape_of(args)
    budgets = args.budgets or [base.budget]
    found = [("ar", plain)]
    for depth, width, budget in product(
        args.fixed_depths or [shape.depth], args.fixed_widths or [shape.width], budgets
    ):
        fixed = TreeShape(depth, width, budget)
        found.append((f"fixed d{depth} k{width} n{budget}", replace(drafted, shape=fixed)))
    depths = args.depths or [(base.depth_min, base.depth_start, base.depth_max)]
    widths = args.widths or [(base.width_min, base.width_start, base.width_max)]
    grid = product(args.betas, args.step_depths, args.step_widths, depths, widths, budgets, args.inits)
    for beta, step_depth, step_width, depth, width, budget, init in grid:
        constants = AdaptConstants(
            beta=beta, step_depth=step_depth, step_width=step_width,
            depth_min=depth[0], depth_start=depth[1], depth_max=depth[2],
            width_min=width[0], width_start=width[1], width_max=width[2],
            budget=budget, init=init,
        )  # fmt: skip
        found.append((_label(constants), replace(drafted, adapt=constants)))
    if len({name for name, _ in found}) != len(found):
        raise UserError("sweep: a value stands twice in one of the lists; give each once")
    check_drafter(args, (method for _, method in found))
    return found


def _label(c: AdaptConstants) -> str:
    return (
        f"{c.init[0]} b{c.beta:g} ld{c.step_depth} lk{c.step_width} "
        f"d{c.depth_min}:{c.depth_start}:{c.depth_max} "
        f"k{c.width_min}:{c.width_start}:{c.width_max} n{c.budget}"
    )
