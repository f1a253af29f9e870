"""Options of bench, and the methods its arms stand for. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace

from eval.errors import UserError
from eval.families import static_of
from eval.method import Method, adapt_constants, check_model, fixed_shape, lantern, refuse_idle, unused
from eval.options import (
    add_adapt_arguments,
    add_lantern_arguments,
    add_law_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_run_arguments,
    add_tree_arguments,
)
from eval.parser import at_least, within
from models.registry import SPECS

PAPER_ARMS = ("ar", "eagle1", "eagle2", "adt", "lantern", "adt_lantern")
BOUNDS = ("floor", "ceiling")  # eagle2 with a verdict of their own
STALE_ARMS = (
    "jacobi", "adt_jacobi", "jacobi_lantern", "adt_jacobi_lantern", "hybrid", "adt_hybrid", "hybrid_lantern"
)  # fmt: skip
ARMS = (*PAPER_ARMS, *STALE_ARMS, *BOUNDS)
EAGLE2 = {
    "model_type": "eagle",
    "drafter_type": "eagle",
    "peanut": False,
    "static_tree": False,
    "lantern": False,
}
# arm -> what generate_images is given for the same method, beside EAGLE2
FLAGS: dict[str, dict[str, object]] = {
    "ar": {"model_type": "base"}, "eagle1": {"static_tree": True}, "eagle2": {}, "adt": {"peanut": True},
    "lantern": {"lantern": True}, "adt_lantern": {"lantern": True, "peanut": True},
    "jacobi": {"drafter_type": "jacobi"}, "adt_jacobi": {"drafter_type": "jacobi", "peanut": True},
    "hybrid": {"drafter_type": "hybrid"}, "adt_hybrid": {"drafter_type": "hybrid", "peanut": True},
    "jacobi_lantern": {"drafter_type": "jacobi", "lantern": True},
    "adt_jacobi_lantern": {"drafter_type": "jacobi", "lantern": True, "peanut": True},
    "hybrid_lantern": {"drafter_type": "hybrid", "lantern": True},
    "floor": {}, "ceiling": {},
}  # fmt: skip
LANTERN_K, LANTERN_DELTA = 100, 0.5
REFERENCED = tuple(name for name, spec in SPECS.items() if spec.reference)  # eval.baseline decodes them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of bench."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, "configs/emoji_held_out.txt", 16)
    add_law_arguments(parser, temperature=False)
    group = parser.add_argument_group("arms")
    group.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(PAPER_ARMS),
        help="ar: plain decoding, always taken along; "
        "eagle1: --tree_choices; eagle2: trees of fixed shape; adt: adaptive trees; lantern: eagle2 relaxed; "
        "adt_lantern: adt relaxed; jacobi, adt_jacobi: self-drafted trees, fixed and adaptive; "
        "hybrid, adt_hybrid: drafter network and self-drafting in one tree; "
        "jacobi_lantern, adt_jacobi_lantern, hybrid_lantern: those relaxed; "
        "floor, ceiling: eagle2 with no draft or every first draft accepted, bounds and no images "
        "(default: ar to adt_lantern)",
    )
    group.add_argument(
        "--temperatures",
        nargs="+",
        type=within(0, 100),
        default=[0.0, 1.0],
        metavar="T",
        help="every arm runs at each",
    )
    group.add_argument(
        "--warmup", type=at_least(0), default=1, metavar="IMAGES", help="images an arm makes before timing"
    )
    group.add_argument(
        "--reference",
        choices=("transformers",),
        help="also time transformers' decoder with a static cache on the same checkpoint (default: none)",
    )
    group.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="after timing, split the time of the first images into target, drafter, tree, verify and host; "
        "then measure what passes cost, and set the cycles beside it",
    )
    add_lantern_arguments(
        parser, switch=False, delta=LANTERN_DELTA, k=f"{LANTERN_K}, or an eighth of a smaller codebook"
    )
    add_tree_arguments(parser)
    add_adapt_arguments(parser)
    add_run_arguments(parser, "runs/bench", graphs=True)


def arm_method(args: argparse.Namespace, arm: str, temperature: float) -> Method:
    """The method of one arm. UserError for constants that contradict one another."""
    base = Method(temperature, args.top_k, args.top_p, args.cfg)
    if arm == "ar":
        return base
    own = argparse.Namespace(**{**vars(args), **EAGLE2, **FLAGS[arm]})
    adapt = adapt_constants(own) if own.peanut else None
    if own.lantern:
        base = replace(base, lantern=lantern(args, LANTERN_DELTA, LANTERN_K))
    if own.drafter_type != "eagle":
        tree = {"shape": fixed_shape(own)} if adapt is None else {"adapt": adapt}
        return replace(base, drafter=own.drafter_type, seed_cells=args.seed_cells or "above", **tree)
    return replace(
        base,
        verify=args.verify or "coupled",
        rules=args.rules or "fixed",
        static=static_of(args) if arm == "eagle1" else None,
        shape=fixed_shape(own) if arm in ("eagle2", "lantern", *BOUNDS) else None,
        control=arm if arm in BOUNDS else None,
        adapt=adapt,
    )


def _unused(args: argparse.Namespace, arm: str) -> dict[str, str]:
    """Options that would do nothing in an arm, at any of the temperatures, by the definition in method."""
    laws = [
        unused(argparse.Namespace(**{**vars(args), **EAGLE2, "temperature": t, **FLAGS[arm]}))
        for t in args.temperatures
    ]
    found = {name: reason for name, reason in laws[0].items() if all(name in law for law in laws)}
    if arm in BOUNDS:
        found |= dict.fromkeys(("verify", "rules"), "floor and ceiling are verdicts of their own")
    return found


def _check_used(args: argparse.Namespace, arms: Iterable[str]) -> None:
    """UserError for an option that none of the arms uses."""
    if args.drafter_type is not None:
        raise UserError(f"--drafter_type {args.drafter_type}: choose --arms {', '.join(STALE_ARMS)}")
    idle = {arm: _unused(args, arm) for arm in ARMS}
    chosen = list(arms)
    refuse_idle(args, idle, chosen, f"--arms {' '.join(chosen)}", plain="eagle2")


def check_reference(args: argparse.Namespace) -> None:
    """UserError for a --reference of a model that it does not decode."""
    if args.reference and args.model not in REFERENCED:
        raise UserError(
            f"--reference {args.reference} with --model {args.model}: transformers' model is decoded for "
            f"{' and '.join(REFERENCED)} only; leave it out"
        )


def arm_methods(args: argparse.Namespace) -> list[tuple[str, Method]]:
    """(arm, method) for every arm at every temperature, plain decoding first at each."""
    check_model(args)
    names = ["ar", *(arm for arm in ARMS if arm in args.arms and arm != "ar")]
    _check_used(args, names)
    return [(name, arm_method(args, name, t)) for t in dict.fromkeys(args.temperatures) for name in names]
