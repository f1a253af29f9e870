"""Options -> one checked description of the method. Impossible combinations end here. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from adt_tree.policy import AdaptiveTree, TreeShape, self_drafted
from eval.errors import UserError
from eval.families import FASTEST, by_eagle_version, check_family, constants_of, shape_of, static_of
from eval.options import ADAPT_FIELDS, DEFAULT_DELTA

GREEDY = 1e-5  # the published code's bound of temperature 0


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxed acceptance: neighbours (None: `most`, or an eighth of a smaller codebook) and budget."""

    k: int | None
    delta: float
    most: int = 1000  # the published default, for codebooks of 8,192
    table: str | None = None  # of nearest codes: a file or folder; None: the model's own


@dataclass(frozen=True, slots=True)
class Method:
    """A sampling law and how it is decoded. At most one of static, shape and adapt; none: plain decoding."""

    temperature: float
    top_k: int
    top_p: float
    cfg: float
    static: str | None = None
    shape: TreeShape | None = None
    adapt: AdaptiveTree | None = None
    lantern: Lantern | None = None
    verify: str = "coupled"
    rules: str = "fixed"
    control: str | None = None  # floor or ceiling: a verdict that ignores the law
    drafter: str = "eagle"
    seed_cells: str = "above"  # of self-drafting

    @property
    def drafting(self) -> bool:
        """Whether there are draft trees at all."""
        return any(tree is not None for tree in (self.static, self.shape, self.adapt))

    @property
    def needs_drafter(self) -> bool:
        """Whether a drafter network drafts."""
        return self.drafting and self.drafter != "jacobi"

    @property
    def greedy(self) -> bool:
        """Whether the law is the argmax."""
        return self.temperature <= GREEDY

    @property
    def exact(self) -> bool:
        """Whether one seed gives plain decoding's image: coupled or greedy verification, no relaxation."""
        return self.lantern is None and self.control is None and (self.verify == "coupled" or self.greedy)


def check_model(args: argparse.Namespace) -> None:
    """Refuse models that this version does not run, options of others, and an empty window of prompts."""
    check_family(args)
    if args.end_idx is not None and args.end_idx <= args.start_idx:
        raise UserError(f"--end_idx {args.end_idx}: it must exceed --start_idx {args.start_idx}")


def adapt_constants(args: argparse.Namespace) -> AdaptiveTree:
    """The adaptive tree's constants; UserError where they contradict one another."""
    base = constants_of(args)
    given = {field: getattr(args, option) for option, field in ADAPT_FIELDS.items()}
    values = {field: value for field, value in given.items() if value is not None}
    if args.total_token is not None:
        values["budget"] = args.total_token - 1
    for side in ("depth", "width"):  # a bound moved past other defaults takes them with it
        if f"{side}_max" in values and f"{side}_min" not in values:
            values[f"{side}_min"] = min(values[f"{side}_max"], getattr(base, f"{side}_min"))
        if f"{side}_start" not in values:
            low = values.get(f"{side}_min", getattr(base, f"{side}_min"))
            high = values.get(f"{side}_max", getattr(base, f"{side}_max"))
            values[f"{side}_start"] = max(low, min(high, getattr(base, f"{side}_start")))
    try:
        return replace(base, **values)
    except ValueError as error:
        raise UserError(str(error)) from error


def fixed_shape(args: argparse.Namespace) -> TreeShape:
    """The shape of EAGLE-2's trees, or of self-drafted ones, whose main chain follows the budget."""
    base = shape_of(args)
    budget = (args.total_token or base.budget + 1) - 1
    if args.drafter_type in ("jacobi", "hybrid"):
        base = self_drafted(budget)
    return TreeShape(args.depth or base.depth, args.draft_top_k or base.width, budget)


def lantern(args: argparse.Namespace, delta: float = DEFAULT_DELTA, most: int = 1000) -> Lantern:
    """Relaxation with the given defaults."""
    budget = delta if args.lantern_delta is None else args.lantern_delta
    return Lantern(args.lantern_k, budget, most, args.lantern_table)


def shown(args: argparse.Namespace, name: str) -> str | None:
    """An option as it was given on the command line; None if it was not."""
    value = getattr(args, name)
    if value is None or value is False:
        return None
    words = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"--{name}" if value is True else f"--{name} {words}"


def _refuse(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """UserError if any of the options was given."""
    for name in names:
        if given := shown(args, name):
            raise UserError(f"{given}: {reason}")


def unused(args: argparse.Namespace) -> dict[str, str]:
    """Options, given or not, that would do nothing in the method that args choose, each with the reason."""
    adt, fixed = tuple(ADAPT_FIELDS), ("depth", "draft_top_k")
    trees = ("static_tree", "tree_choices", "seed_cells", "total_token", *fixed, "verify", "rules", *adt)
    kind, reference = args.drafter_type, args.rules == "reference"
    jacobi, stale = kind == "jacobi", kind in ("jacobi", "hybrid")
    no_trees = ("drafter_path", "drafter_alignment", "peanut", "lantern", *trees)
    cases = (
        (
            args.model_type == "base",
            ("drafter_type", *no_trees),
            "plain decoding (--model_type base) has no draft trees; leave it out",
        ),
        (
            kind == "none",
            no_trees,
            "--drafter_type none has no draft trees; leave it out",
        ),
        (not stale, ("seed_cells",), "it needs --drafter_type jacobi or hybrid"),
        (
            jacobi,
            ("drafter_path", "drafter_alignment"),
            "--drafter_type jacobi has no drafter network; leave it out",
        ),
        (
            stale and args.verify == "rejection",
            ("verify",),
            f"drafts of --drafter_type {kind} share the target's noise: only the coupled rule may test them; "
            "leave it out",
        ),
        (not args.lantern, ("lantern_k", "lantern_delta", "lantern_table"), "it needs --lantern"),
        (not args.peanut, adt, "it needs --peanut"),
        (
            args.peanut,
            fixed,
            "with --peanut the shape adapts; use --adt_depth_start, --adt_width_start and the bounds",
        ),
        (args.static_tree, ("total_token", *fixed), "with --static_tree the shape is that of --tree_choices"),
        (not args.static_tree, ("tree_choices",), "it needs --static_tree"),
        (
            reference and args.verify != "rejection",
            ("rules",),
            "the released arithmetic is of the rejection rules; add --verify rejection",
        ),
        (reference and args.temperature <= GREEDY, ("rules",), "it changes nothing at temperature 0"),
    )
    found: dict[str, str] = {}
    for holds, names, reason in cases:
        for name in names if holds else ():
            found.setdefault(name, reason)
    return found


def refuse_idle(
    args: argparse.Namespace,
    idle: Mapping[str, Mapping[str, str]],
    chosen: Sequence[str],
    asked: str,
    plain: str,
) -> None:
    """UserError for an option that was given and that none of the chosen arms uses.

    idle: of every arm there is, the options that do nothing in it, each with the reason, as `unused` has
    them. asked: how the chosen ones were asked for. plain: the arm whose reason is given where no arm at all
    uses the option.
    """
    for name in sorted(set().union(*idle.values()) & set(vars(args))):
        given = shown(args, name)
        if given is None or not all(name in idle[arm] for arm in chosen):
            continue
        users = [arm for arm in idle if name not in idle[arm]]
        if not users:
            raise UserError(f"{given}: {idle[plain][name]}")
        raise UserError(
            f"{given}: no chosen arm uses it ({asked}); leave it out or add one that does: {', '.join(users)}"
        )


def check_drafter(args: argparse.Namespace, methods: Iterable[Method]) -> None:
    """UserError for a --drafter_path that no method reads."""
    if not any(method.needs_drafter for method in methods):
        _refuse(args, ("drafter_path", "drafter_alignment"), "no drafter network drafts here; leave it out")


def drafter_type(args: argparse.Namespace) -> str:
    """--drafter_type, or its default for the other options and the model."""
    if args.drafter_type is not None:
        return args.drafter_type
    network = args.static_tree or args.verify == "rejection" or args.drafter_path is not None
    return "eagle" if network else FASTEST.get(args.model, "eagle")


def drafted_by(args: argparse.Namespace, drafter: str) -> argparse.Namespace:
    """The options with that --drafter_type."""
    return argparse.Namespace(**{**vars(args), "drafter_type": drafter})


def _check_combination(args: argparse.Namespace, drafter: str) -> None:
    """No option may be given where it would do nothing; drafter: who drafts, given or not."""
    _refuse(
        args, ("grid_search",), "the published flag is never read; use `main.py bench --vary`"
    )
    if args.model_type == "vllm":
        raise UserError("--model_type vllm: not available; choose eagle or base")
    if args.peanut and args.static_tree:
        raise UserError("--peanut with --static_tree: an adaptive tree is not static; choose one")
    if args.static_tree and drafter in ("jacobi", "hybrid"):
        raise UserError(
            f"--static_tree with --drafter_type {drafter}: static trees need a network alone; choose one"
        )
    for name, reason in unused(drafted_by(args, drafter)).items():
        _refuse(args, (name,), reason)


def method_from(args: argparse.Namespace) -> Method:
    """The method that generate_images was asked for; UserError for what cannot be."""
    check_model(args)
    args = by_eagle_version(args)
    drafter = drafter_type(args)
    _check_combination(args, drafter)
    args = drafted_by(args, drafter)
    plain = Method(args.temperature, args.top_k, args.top_p, args.cfg)
    if args.model_type == "base" or drafter == "none":
        return plain
    dynamic = not (args.static_tree or args.peanut)
    return replace(
        plain,
        static=static_of(args) if args.static_tree else None,
        shape=fixed_shape(args) if dynamic else None,
        adapt=adapt_constants(args) if args.peanut else None,
        lantern=lantern(args) if args.lantern else None,
        verify=args.verify or "coupled",
        rules=args.rules or "fixed",
        drafter=drafter,
        seed_cells=args.seed_cells or "above",
    )
