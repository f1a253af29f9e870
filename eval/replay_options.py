"""Options of replay, and the methods its rows stand for. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from eval.errors import UserError
from eval.method import Method, adapt_constants, fixed_shape
from eval.options import ADAPT_FIELDS, DRAFTERS, SEED_CELLS, SHAPE_OF, add_adapt_arguments, add_run_arguments
from eval.parser import Parser, at_least, within

POLICIES = ("fixed", "adt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of replay."""
    parser.add_argument("run", metavar="RUN", help="output folder of generate_images with --dump")
    _add_arm_arguments(parser)
    _add_oracle_arguments(parser)
    parser.add_argument(
        "--rules",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="instead of arms: expected codes a target call of the rejection rule, of traversal and block "
        "verification on the trees of a run with --verify rejection --static_tree, and of the coupled rule, "
        "for which the prompts are decoded once more",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model_path", metavar="DIR", help="the run's checkpoint (default: where the run had it)"
    )
    group.add_argument(
        "--drafter_path", metavar="DIR", help="this drafter or another one (default: the run's)"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    group.add_argument(
        "--batch_size",
        type=at_least(1),
        metavar="IMAGES",
        help="images in flight at once (default: the run's)",
    )
    group.add_argument(
        "--num_images", type=at_least(1), metavar="N", help="first dumped images (default: all)"
    )
    add_run_arguments(parser, "runs/replay")


def _add_arm_arguments(parser: argparse.ArgumentParser) -> None:
    """Rows of the table."""
    group = parser.add_argument_group(
        "arms",
        "Every proposer with every policy; a fixed policy at every shape, an adaptive one at every budget.",
    )
    group.add_argument(
        "--proposers",
        nargs="+",
        choices=DRAFTERS,
        metavar="NAME",
        help="eagle, jacobi, hybrid; replay of eagle is exact; jacobi and hybrid need a run drafted by "
        "one of them, and are exact for its own arm alone (default: all that the run allows)",
    )
    group.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="who shapes trees"
    )
    group.add_argument(
        "--budgets",
        nargs="+",
        type=at_least(1),
        default=[8, 16, 32, 64, 128],
        metavar="NODES",
        help="drafted nodes of a tree, root excluded",
    )
    shapes = [SHAPE_OF[drafter] for drafter in DRAFTERS]
    group.add_argument(
        "--depth",
        nargs="+",
        type=at_least(1),
        metavar="LEVELS",
        help=f"of fixed trees (default for {', '.join(DRAFTERS)}: {', '.join(str(s.depth) for s in shapes)})",
    )
    group.add_argument(
        "--draft_top_k",
        nargs="+",
        type=at_least(1),
        metavar="NODES",
        help="children a node, or candidates a cell, of fixed trees "
        f"(default for {', '.join(DRAFTERS)}: {', '.join(str(s.width) for s in shapes)})",
    )
    group.add_argument("--seed_cells", choices=SEED_CELLS, help="as of generate_images (default: the run's)")
    add_adapt_arguments(parser)


def _add_oracle_arguments(parser: argparse.ArgumentParser) -> None:
    """The best shape at every cell, known only afterwards."""
    group = parser.add_argument_group(
        "oracle", "The least cost of an image with the eagle drafter, were the best shape at each cell known."
    )
    group.add_argument(
        "--oracle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add its row, where eagle is replayed",
    )
    group.add_argument(
        "--oracle_depths",
        nargs="+",
        type=at_least(1),
        default=[1, 2, 3, 4, 5, 6, 8],
        metavar="LEVELS",
        help="of its shapes, combined with --oracle_widths and --budgets; it may also draft nothing",
    )
    group.add_argument(
        "--oracle_widths",
        nargs="+",
        type=at_least(1),
        default=[1, 2, 4, 8],
        metavar="NODES",
        help="of its shapes",
    )
    group.add_argument(
        "--level_cost",
        type=within(0, 100),
        default=0.1,
        metavar="PASSES",
        help="of one drafter pass, in target passes over one node (bench --profile measures it)",
    )
    group.add_argument(
        "--node_cost",
        type=within(0, 100),
        default=0.02,
        metavar="PASSES",
        help="of one more node in a target pass, in target passes over one node",
    )


def check_used(args: argparse.Namespace, recorded: Method) -> None:
    """UserError for an option that would do nothing."""
    parser = Parser("replay", "")
    add_arguments(parser)
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    oracle = ("oracle_depths", "oracle_widths")
    everywhere = (
        "run",
        "rules",
        "model_path",
        "drafter_path",
        "device",
        "batch_size",
        "num_images",
        "output_dir",
    )
    drafters = [] if args.rules else proposers(args, recorded)
    cases = (
        (args.rules, set(given) - {*everywhere, "config", "debug"}, "--rules takes the run's own trees"),
        ("fixed" not in args.policies, ("depth", "draft_top_k"), "it needs --policies fixed"),
        ("adt" not in args.policies, tuple(ADAPT_FIELDS), "it needs --policies adt"),
        (drafters == ["eagle"], ("seed_cells",), "it needs --proposers jacobi or hybrid"),
        (not args.oracle or "eagle" not in drafters, oracle, "it needs --oracle and --proposers eagle"),
    )
    for holds, names, reason in cases:
        for name in sorted(set(names) & set(given)) if holds else ():
            raise UserError(f"--{name}: {reason}; leave it out")


def proposers(args: argparse.Namespace, recorded: Method) -> list[str]:
    """Who drafts in the replay. UserError for proposers whose drafts the run cannot tell."""
    stale = recorded.drafter != "eagle"
    chosen = args.proposers or (DRAFTERS if stale else ("eagle",))
    for name in chosen:
        if name != "eagle" and not stale:
            raise UserError(
                f"--proposers {name}: trees of --drafter_type eagle score too few cells ahead; dump a run "
                "with --drafter_type jacobi or hybrid"
            )
    return [name for name in DRAFTERS if name in chosen]


def methods(args: argparse.Namespace, recorded: Method) -> Iterator[tuple[str, Method]]:
    """(policy, method) of every row. recorded: the run's method. UserError for contradicting constants."""
    budgets, depths, widths = (
        list(dict.fromkeys(x or [None])) for x in (args.budgets, args.depth, args.draft_top_k)
    )
    for drafter, policy, budget in product(proposers(args, recorded), args.policies, budgets):
        law = replace(
            recorded, static=None, shape=None, adapt=None, drafter=drafter,
            seed_cells=args.seed_cells or recorded.seed_cells,
        )  # fmt: skip
        own = argparse.Namespace(**{**vars(args), "drafter_type": drafter, "total_token": budget + 1})
        if policy == "adt":
            yield policy, replace(law, adapt=adapt_constants(own))
            continue
        for own.depth, own.draft_top_k in product(depths, widths):
            yield policy, replace(law, shape=fixed_shape(own))
