"""Options of the method, and the one table of what cannot be combined: options -> a checked Method. No torch.

An option that would do nothing in the chosen method is refused, so that no flag is ever silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from adt_tree.method import METHODS, RELAXED, RULES, VERIFY, Lantern, Method
from adt_tree.policy import (
    BUDGET,
    INITS,
    SEED_CELLS,
    SELF_DRAFTED,
    WINDOW_CELLS,
    WINDOWS,
    AdaptiveTree,
    TreeShape,
    self_drafted,
    windowed,
)
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES
from cli.groups import FilterOptions, ModelOptions, SamplingOptions, by_model
from cli.options import Options, declare, option, shown
from eval.errors import UserError, refusals
from models.registry import SPECS
from models.spec import EMBEDDED_TREE

RIVALS = tuple(WINDOWS)
CHAINS = tuple(name for name, (candidates, _) in WINDOWS.items() if candidates == 1)
DRAFTERS = ("eagle", "self-draft", *RIVALS)
STATIC = SPECS["emoji"].static_tree
ADAPT, LANTERN = AdaptiveTree(), Lantern()


def _default(field: str, more: int = 0) -> str:
    """The default of a fixed shape's field by drafter, and for models with trees of their own."""
    usual, drafted = (getattr(tree, field) + more for tree in (EMBEDDED_TREE, self_drafted(BUDGET)))
    own = by_model(usual, lambda spec: getattr(spec.tree, field) + more)
    return f"{usual}, {drafted}{own}"


def drafter_of(method: str) -> str:
    """Who drafts in a method: a --drafter_type."""
    who = METHODS[method]
    return who if who in ("none", "eagle") else method.removeprefix("adt-")


def _adapt(field: str, text: str, unit: str, least: int = 1) -> int | None:
    """An option of the adaptive tree, with its defaults for the network and for self-drafting."""
    stated = f"{text} (default: {getattr(ADAPT, field)}, {getattr(SELF_DRAFTED, field)})"
    return option(stated, unit=unit, least=least)


@declare
class MethodOptions(Options):
    """method"""

    model_type: str = option(
        "eagle: draft trees; base: the AR baseline, no drafts; vllm is refused",
        "eagle",
        choices=("eagle", "base", "vllm"),
    )
    drafter_type: str | None = option(
        "eagle: the drafter network; self-draft: the target's own choices at rejected nodes, "
        "no network; "
        f"{', '.join(RIVALS)}: published rivals, whose images are not the AR baseline's, but follow the "
        "same distribution; none: the AR baseline "
        "(default: eagle with --static_tree, --verify rejection or --drafter_path, else the fastest exact "
        "one of the model: "
        f"{', '.join(f'{name} {drafter_of(spec.method)}' for name, spec in SPECS.items())})",
        choices=(*DRAFTERS, "none"),
    )
    peanut: bool = option(
        "ADT-Tree: depth and width of each tree from the adjacent cell and the last acceptance rate", False
    )
    static_tree: bool = option(
        "EAGLE-1: a static tree of the drafter network; else dynamic trees (of it alone, EAGLE-2)", False
    )
    eagle_version: int | None = option(
        "lumina_mgpt's switch: 1, static trees; any other number, dynamic ones (default: dynamic)", unit="N"
    )
    grid_search: bool = option("never read by the published code: refused; `bench --vary` searches", False)
    lantern: bool = option(
        "accept codes for the mass of their neighbours: faster, not the target's distribution", False
    )


@declare
class LanternOptions(Options):
    """relaxed acceptance (LANTERN)"""

    lantern_k: int | None = option(
        f"neighbours (default: {LANTERN.most}, bench {RELAXED.most}; or an eighth of a smaller codebook)",
        unit="CODES",
        least=0,
    )
    lantern_delta: float | None = option(
        "up to 1: bound on the borrowed mass; above 1: LANTERN++'s factor on the code's own probability "
        f"(default: the published {LANTERN.delta:g}, bench {RELAXED.delta:g})",
        unit="D",
        least=0,
        most=1e6,
    )
    lantern_table: str | None = option(
        "table of nearest codes, top_{V - 1}_indices.npy or its folder (default: the one in the checkpoint's "
        "or drafter's folder or in ckpts/MODEL/vq_distances, else computed from the codebook)",
        unit="PATH",
    )


@declare
class TreeOptions(Options):
    """draft trees

    --depth and --draft_top_k are of dynamic trees of fixed shape. Two defaults are those of eagle and
    self-draft; one of a model is its eagle's. The rivals sjd, sjd-coupled and sjd-pac have 16, 64
    and 64 nodes as published: a chain, in sjd-pac with --draft_top_k (4) candidates for the first positions,
    two of them, or what --depth leaves of --total_token.
    """

    ALIASES: ClassVar[dict[str, str]] = {"drafter_top_k": "draft_top_k"}
    seed_cells: str | None = option(
        f"what drafts of positions not seen yet copy; self-draft: {', '.join(SEED_CELLS)} (default: "
        f"{SEED_CELLS[0]}); rivals: {', '.join(WINDOW_CELLS)} (default: {WINDOW_CELLS[0]})",
        unit="CELL",
    )
    tree_choices: str | None = option(
        f"the static tree: {', '.join(STATIC_TREES)} (default: {STATIC}"
        f"{by_model(STATIC, lambda spec: spec.static_tree)})",
        unit="TREE",
    )
    total_token: int | None = option(
        f"nodes of a dynamic tree, root included (default: {_default('budget', 1)})",
        unit="NODES",
        least=2,
    )
    depth: int | None = option(
        "levels below the root; self-draft: codes of the main chain, 3/4 of --total_token, or "
        f"half of a large one (default: {_default('depth')})",
        unit="LEVELS",
        least=1,
    )
    draft_top_k: int | None = option(
        "children per node and nodes per level; self-draft: candidates per cell (default: "
        f"{_default('width')})",
        unit="NODES",
        least=1,
    )
    verify: str | None = option(
        "coupled: the AR baseline's image; rejection: the published rules (default: coupled)", choices=VERIFY
    )
    rules: str | None = option(
        "reference: the released code's arithmetic of --verify rejection (default: fixed)", choices=RULES
    )


@declare
class AdaptOptions(Options):
    """adaptive trees (ADT-Tree)

    These constants need --peanut where it exists; two defaults are those of eagle and of the others.
    """

    adt_init: str | None = option(
        "decoded neighbour whose state a tree starts from: left, above, the mean of both, or any cell "
        f"(default: {ADAPT.init})",
        choices=INITS,
    )
    adt_beta: float | None = option(
        f"acceptance rate from which trees deepen (default: {ADAPT.beta:g}, {SELF_DRAFTED.beta:g})",
        unit="RATE",
        least=0,
        most=1,
    )
    adt_step_depth: int | None = _adapt("step_depth", "l_d, change of depth per step", "LEVELS", 0)
    adt_step_width: int | None = _adapt("step_width", "l_k, change of width per step", "NODES", 0)
    adt_depth_min: int | None = _adapt("depth_min", "least depth", "LEVELS")
    adt_depth_max: int | None = _adapt("depth_max", "greatest depth", "LEVELS")
    adt_width_min: int | None = _adapt("width_min", "least width", "NODES")
    adt_width_max: int | None = _adapt("width_max", "greatest width", "NODES")
    adt_depth_start: int | None = _adapt("depth_start", "depth of the first tree", "LEVELS")
    adt_width_start: int | None = _adapt("width_start", "width of the first tree", "NODES")


@declare
class DecodingOptions(
    ModelOptions, SamplingOptions, MethodOptions, LanternOptions, TreeOptions, AdaptOptions
):
    """decoding"""


# option -> field of AdaptiveTree; the budget is --total_token less the root
ADAPT_FIELDS = {name: name.removeprefix("adt_") for name in vars(AdaptOptions)["__annotations__"]}
Condition = Callable[[DecodingOptions], bool]
TREE = ("total_token", "depth", "draft_top_k")
NO_TREES = (
    "drafter_path", "drafter_alignment", "peanut", "static_tree", "lantern", "tree_choices", "seed_cells",
    *TREE, "verify", "rules", *ADAPT_FIELDS,
)  # fmt: skip


# Condition on the resolved options -> options that may not be given then -> why. The first that holds speaks.
REFUSED: tuple[tuple[Condition, tuple[str, ...], str], ...] = (
    (lambda o: True, ("grid_search",), "the published flag is never read; use `main.py bench --vary`"),
    (lambda o: o.model_type == "vllm", ("model_type",), "not available; choose eagle or base"),
    (lambda o: o.model != "lumina_mgpt", ("eagle_version",),
     "it belongs to lumina_mgpt; choose --static_tree (1) or leave it out (2)"),
    (lambda o: o.eagle_version not in (None, 1), ("static_tree",),
     "--eagle_version says dynamic trees; choose one"),
    (lambda o: o.model_type == "base", ("drafter_type", *NO_TREES),
     "the AR baseline (--model_type base) has no draft trees; leave it out"),
    (lambda o: o.drafter_type == "none", NO_TREES, "--drafter_type none has no draft trees; leave it out"),
    (lambda o: o.static_tree, ("peanut",), "with --static_tree the tree is not adaptive; choose one"),
    (lambda o: o.drafter_type in ("self-draft", *RIVALS), ("static_tree",),
     "without --drafter_type eagle: static trees need a network alone; choose one"),
    (lambda o: o.drafter_type in RIVALS, ("peanut", "lantern", "verify"),
     "a rival has its own rule and a fixed window; leave it out"),
    (lambda o: o.drafter_type in CHAINS, ("depth", "draft_top_k"),
     "its drafts are one chain, as long as --total_token says; leave it out"),
    (lambda o: o.drafter_type == "eagle", ("seed_cells",),
     "it needs drafts from the target's earlier passes; choose another --drafter_type"),
    (lambda o: o.drafter_type in ("self-draft", *RIVALS), ("drafter_path", "drafter_alignment"),
     "without a drafter network; leave it out"),
    (lambda o: o.drafter_type == "self-draft" and o.verify == "rejection", ("verify",),
     "these drafts share the target's noise: only the coupled rule may test them; leave it out"),
    (lambda o: not o.lantern, ("lantern_k", "lantern_delta", "lantern_table"), "it needs --lantern"),
    (lambda o: not o.peanut, tuple(ADAPT_FIELDS), "it needs --peanut"),
    (lambda o: o.peanut, ("depth", "draft_top_k"),
     "with --peanut the shape adapts; use --adt_depth_start, --adt_width_start and the bounds"),
    (lambda o: o.static_tree, TREE, "with --static_tree the shape is that of --tree_choices"),
    (lambda o: not o.static_tree, ("tree_choices",), "it needs --static_tree"),
    (lambda o: o.rules == "reference" and o.verify != "rejection", ("rules",),
     "the released arithmetic is of the rejection rules; add --verify rejection"),
    (lambda o: o.rules == "reference" and Sampling(o.temperature).greedy, ("rules",),
     "it changes nothing at temperature 0"),
)  # fmt: skip


def unused(options: DecodingOptions) -> dict[str, str]:
    """Options, given or not, that would do nothing with the resolved ones, each with the reason."""
    found: dict[str, str] = {}
    for holds, names, reason in REFUSED:
        for name in names if holds(options) else ():
            found.setdefault(name, reason)
    return found


def check_model(options: ModelOptions) -> None:
    """Refuse models that this version does not run, and options that belong to others alone."""
    if options.model not in SPECS:
        raise UserError(
            f"--model {options.model}: no such model; use one of {', '.join(SPECS)} (--model_path for other "
            "weights)"
        )
    sequential = isinstance(options, FilterOptions) and options.cfg_mode == "sequential"
    if sequential and options.model != "lumina_mgpt":
        raise UserError(
            "--cfg_mode sequential: it belongs to lumina_mgpt; both guidance rows share a pass, leave it out"
        )
    for name in dict.fromkeys(name for spec in SPECS.values() for name in spec.options):
        if getattr(options, name, None) and name not in SPECS[options.model].options:
            models = " or ".join(model for model, spec in SPECS.items() if name in spec.options)
            raise UserError(f"--{name}: it belongs to --model {models}; leave it out")


def resolved(options: DecodingOptions) -> DecodingOptions:
    """The options with who drafts and whether the tree is static, where they leave it to a default."""
    static = options.static_tree or options.eagle_version == 1
    drafter = options.drafter_type
    if drafter is None:
        asked = options.drafter_path is not None or options.eagle_version is not None
        network = static or options.verify == "rejection" or asked
        drafter = "eagle" if network else drafter_of(SPECS[options.model].method)
    return replace(options, static_tree=static, drafter_type=drafter)


def method_from(options: DecodingOptions) -> Method:
    """The method that the options ask for; UserError for what cannot be."""
    check_model(options)
    final = resolved(options)
    for name, reason in unused(final).items():
        if given := shown(options, name):
            raise UserError(f"{given}: {reason}")
    with refusals():
        return Method(
            method_name(final),
            Sampling(options.temperature, options.top_k, options.top_p, options.cfg),
            tree_of(final),
            lantern=lantern_of(final, LANTERN) if final.lantern else None,
            verify=final.verify or "coupled",
            rules=final.rules or "fixed",
            seed_cells=final.seed_cells,
        )


def method_name(options: DecodingOptions) -> str:
    """The name of a method from resolved options."""
    if options.model_type == "base" or options.drafter_type == "none":
        return "ar"
    if options.drafter_type == "eagle":
        return "eagle-1" if options.static_tree else "adt-tree" if options.peanut else "eagle-2"
    return f"adt-{options.drafter_type}" if options.peanut else str(options.drafter_type)


def flags_of(method: str) -> dict[str, Any]:
    """The options that give a method of that name: method_name() the other way round."""
    adaptive, static = method.startswith("adt-"), method == "eagle-1"
    return {"drafter_type": drafter_of(method), "peanut": adaptive, "static_tree": static}


def lantern_of(options: LanternOptions, usual: Lantern) -> Lantern:
    """The usual relaxation with what is given."""
    delta = usual.delta if options.lantern_delta is None else options.lantern_delta
    return replace(usual, delta=delta, k=options.lantern_k, table=options.lantern_table)


def tree_of(options: DecodingOptions) -> TreeShape | AdaptiveTree | str | None:
    """The trees of resolved options: those of the model's own for the method, with what was given."""
    base = SPECS[options.model].default_tree(method_name(options))
    if isinstance(base, str):
        return options.tree_choices or base
    if isinstance(base, AdaptiveTree):
        return adaptive(options, base)
    if base is None:
        return None
    budget = base.budget if options.total_token is None else options.total_token - 1
    if options.drafter_type == "self-draft":  # the main chain follows the budget
        base = self_drafted(budget)
    if options.drafter_type in RIVALS:
        base = windowed(options.draft_top_k or base.width, budget)
    return TreeShape(options.depth or base.depth, options.draft_top_k or base.width, budget)


def adaptive(options: DecodingOptions, base: AdaptiveTree) -> AdaptiveTree:
    """The adaptive tree of base with what is given. UserError for constants that contradict one another."""
    given = {field: getattr(options, name) for name, field in ADAPT_FIELDS.items()}
    given["budget"] = options.total_token and options.total_token - 1
    values = {field: value for field, value in given.items() if value is not None}
    for side in ("depth", "width"):  # a bound moved past other defaults takes them with it
        if f"{side}_max" in values and f"{side}_min" not in values:
            values[f"{side}_min"] = min(values[f"{side}_max"], getattr(base, f"{side}_min"))
        if f"{side}_start" not in values:
            low = values.get(f"{side}_min", getattr(base, f"{side}_min"))
            high = values.get(f"{side}_max", getattr(base, f"{side}_max"))
            values[f"{side}_start"] = max(low, min(high, getattr(base, f"{side}_start")))
    with refusals():
        return replace(base, **values)
