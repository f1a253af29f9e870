"""Options of replay, and the methods its rows stand for. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from adt_tree.policy import LEVEL_COST, NODE_COST, POLICIES
from eval.budget_options import BUDGETS
from eval.errors import UserError
from eval.families import SHAPE_OF
from eval.method import Method, adapt_constants, fixed_shape, refuse_idle, shown, unused
from eval.options import DRAFTERS, SEED_CELLS, add_adapt_arguments, add_run_arguments
from eval.parser import at_least, within

FIXED, ORACLE = "fixed", "oracle"
SHAPED_BY = (FIXED, *POLICIES)
BOUNDED = ("eagle", "jacobi")  # whose drafts of every shape a dump tells
OF_ORACLE = ("oracle", "oracle_depths", "oracle_widths")
# What options are where they are not given; the parser's own defaults are None, so that given ones are known.
DEFAULTS: dict[str, object] = {
    "policies": SHAPED_BY, "budgets": BUDGETS, "oracle": True, "oracle_depths": (1, 2, 3, 4, 5, 6, 8, 12, 16),
    "oracle_widths": (1, 2, 4, 8), "level_cost": LEVEL_COST, "node_cost": NODE_COST,
}  # fmt: skip
WITH_RULES = (
    "run", "rules", "model_path", "drafter_path", "device", "batch_size", "num_images", "output_dir",
    "config", "debug",
)  # fmt: skip


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


def _default(name: str) -> str:
    """An option's default in words."""
    value = DEFAULTS[name]
    return f"(default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


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
        "--policies",
        nargs="+",
        choices=SHAPED_BY,
        help="who shapes trees: nobody, or --peanut with that --adt_policy " + _default("policies"),
    )
    group.add_argument(
        "--budgets",
        nargs="+",
        type=at_least(1),
        metavar="NODES",
        help="drafted nodes of a tree, root excluded " + _default("budgets"),
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
        "oracle",
        "The least cost of an image, were the best shape at each cell known; exact with eagle, with jacobi "
        "for the laws ahead that the run saw.",
    )
    group.add_argument(
        "--oracle",
        action=argparse.BooleanOptionalAction,
        help="add its rows (default: where eagle or jacobi is replayed)",
    )
    group.add_argument(
        "--oracle_depths",
        nargs="+",
        type=at_least(1),
        metavar="LEVELS",
        help="of its shapes, combined with --oracle_widths and --budgets; it may also draft nothing "
        + _default("oracle_depths"),
    )
    group.add_argument(
        "--oracle_widths",
        nargs="+",
        type=at_least(1),
        metavar="NODES",
        help="of its shapes " + _default("oracle_widths"),
    )
    group.add_argument(
        "--level_cost",
        type=within(0, 100),
        metavar="PASSES",
        help="of one pass of the drafter network, in target passes over one node (bench --profile "
        "measures it) " + _default("level_cost"),
    )
    group.add_argument(
        "--node_cost",
        type=within(0, 100),
        metavar="PASSES",
        help="of one more node in a target pass, in target passes over one node " + _default("node_cost"),
    )


def check_used(args: argparse.Namespace, recorded: Method) -> None:
    """UserError for an option that would do nothing."""
    if args.rules:
        for name in sorted(set(vars(args)) - set(WITH_RULES)):
            if given := shown(args, name):
                raise UserError(f"{given}: --rules takes the run's own trees; leave it out")
        return
    if args.adt_policy is not None:
        raise UserError(f"--adt_policy {args.adt_policy}: choose --policies {args.adt_policy}")
    drafters, policies = proposers(args, recorded), args.policies or SHAPED_BY
    chosen = [_name(drafter, policy) for drafter, policy in product(drafters, policies)]
    if args.oracle is not False:
        chosen += [_name(drafter, ORACLE) for drafter in drafters if drafter in BOUNDED]
    told = _possible(recorded)
    limits = [(drafter, ORACLE) for drafter in told if drafter in BOUNDED]
    idle = {
        _name(drafter, policy): _unused(args, recorded, drafter, policy)
        for drafter, policy in (*product(told, SHAPED_BY), *limits)
    }
    asked = f"--proposers {' '.join(drafters)} --policies {' '.join(policies)}"
    refuse_idle(args, idle, chosen, asked, plain=_name("eagle", FIXED))


def _name(drafter: str, policy: str) -> str:
    return f"{drafter} {policy}"


def _unused(args: argparse.Namespace, recorded: Method, drafter: str, policy: str) -> dict[str, str]:
    """Options that would do nothing in a row, by the definition in method."""
    like = {  # what generate_images is given for the same method
        "model_type": "eagle", "drafter_type": drafter, "temperature": recorded.temperature,
        "peanut": policy in POLICIES, "adt_policy": policy if policy in POLICIES else None,
        "static_tree": False, "lantern": False, "verify": "coupled", "rules": "fixed",
    }  # fmt: skip
    found = unused(argparse.Namespace(**{**vars(args), **like}))
    if drafter == "jacobi":
        found["level_cost"] = "self-drafting runs no drafter pass"
    if policy == ORACLE:
        return found | dict.fromkeys(("depth", "draft_top_k"), "the oracle's are --oracle_depths and _widths")
    return found | dict.fromkeys(OF_ORACLE, "it needs --proposers eagle or jacobi")


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The options with those that were not given as they are then."""
    missing = {name: value for name, value in DEFAULTS.items() if getattr(args, name) is None}
    return argparse.Namespace(**{**vars(args), **missing})


def _possible(recorded: Method) -> tuple[str, ...]:
    """Whose drafts the run can tell."""
    return ("eagle",) if recorded.drafter == "eagle" else DRAFTERS


def proposers(args: argparse.Namespace, recorded: Method) -> list[str]:
    """Who drafts in the replay. UserError for proposers whose drafts the run cannot tell."""
    possible = _possible(recorded)
    chosen = args.proposers or possible
    for name in chosen:
        if name not in possible:
            raise UserError(
                f"--proposers {name}: trees of --drafter_type eagle score too few cells ahead; dump a run "
                "with --drafter_type jacobi or hybrid"
            )
    return [name for name in DRAFTERS if name in chosen]


def bounded(args: argparse.Namespace, recorded: Method) -> list[str]:
    """The proposers that get an oracle's row. args: with_defaults."""
    return [name for name in proposers(args, recorded) if args.oracle and name in BOUNDED]


def methods(args: argparse.Namespace, recorded: Method) -> Iterator[Method]:
    """The method of every row. args: with_defaults; recorded: the run's method. UserError for contradicting
    constants."""
    policies, budgets, depths, widths = (
        list(dict.fromkeys(x or [None])) for x in (args.policies, args.budgets, args.depth, args.draft_top_k)
    )
    for drafter, policy, budget in product(proposers(args, recorded), policies, budgets):
        law = replace(
            recorded, static=None, shape=None, adapt=None, drafter=drafter,
            seed_cells=args.seed_cells or recorded.seed_cells,
        )  # fmt: skip
        own = argparse.Namespace(**{**vars(args), "drafter_type": drafter, "total_token": budget + 1})
        if policy != FIXED:
            own.adt_policy = policy
            yield replace(law, adapt=adapt_constants(own))
            continue
        for own.depth, own.draft_top_k in product(depths, widths):
            yield replace(law, shape=fixed_shape(own))
