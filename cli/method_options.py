"""The options of the method, and the checked Method that they ask for. This file does not import torch.

The row of a method (adt_tree.method.METHODS) says which options it reads and what its defaults are. An option
that would change nothing under the chosen method is refused, so that no flag is silently ignored.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from adt_tree.errors import UserError
from adt_tree.fastest_size import AutoTree
from adt_tree.method import ADAPTIVE_OPTIONS, METHODS, RULES, VERIFY, Method, MethodSpec, Relaxed
from adt_tree.policy import INITS, AdaptiveTree, TreeSettings, TreeShape
from adt_tree.settings import Lantern
from adt_tree.static_trees import STATIC_TREES, StaticTree
from cli.options import ModelOptions, RivalOptions, SamplingOptions, check_model, sampling_of
from cli.parser import Options, as_written, declare, option
from cli.relaxed import PUBLISHED_LANTERN, LanternOptions, RowOptions, readers
from models.registry import SPECS

AUTO = "auto"  # value of --total_token: the size of trees is chosen while decoding


def total_token(tree: TreeSettings | None) -> int | str | None:
    """Returns the value of --total_token that gives this tree: the number of nodes of the largest dynamic
    tree, root included, or "auto"; None for static trees and the AR baseline."""
    if isinstance(tree, AutoTree):
        return AUTO
    return tree.largest.num_nodes if isinstance(tree, TreeShape | AdaptiveTree) else None


def _by_method(name: str, value: Callable[[Any], object]) -> str:
    """Returns the default of an option for --help: `value` of the default tree of every method that reads it.

    The defaults of the first model come first, then those of other models that differ from them. An example
    is "4 in eagle-2; 8 in sjd-pac; with anole: 6 in eagle-2".
    """
    readers = [spec.name for spec in METHODS.values() if name in spec.tree_options]
    defaults = {model: {m: value(spec.default_tree(m)) for m in readers} for model, spec in SPECS.items()}
    usual = next(iter(defaults.values()))
    others: dict[str, list[str]] = {}
    for model, values in defaults.items():
        if changed := {method: default for method, default in values.items() if default != usual[method]}:
            others.setdefault(_grouped(changed), []).append(model)
    stated = _grouped(usual) if len(set(usual.values())) > 1 else str(usual[readers[0]])
    return "; ".join([stated, *(f"with {', '.join(models)}: {text}" for text, models in others.items())])


def _grouped(values: Mapping[str, object], word: str = "in") -> str:
    """Returns "1 in a, c; 2 in b" for {"a": 1, "b": 2, "c": 1}."""
    names: dict[object, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return "; ".join(f"{value} {word} {', '.join(group)}" for value, group in names.items())


def _with_trees(kind: type) -> str:
    """Returns the names of the methods whose trees are of that type."""
    return ", ".join(spec.name for spec in METHODS.values() if spec.tree_type is kind)


def _nodes(text: str) -> int | str:
    """Reads --total_token: auto, or a number of nodes of at least 1, which is the root alone."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of nodes; give 1 or more, or {AUTO}")
    if int(text) < 1:
        raise ArgumentTypeError(f"{text} is too small: give 1 or more, or {AUTO}")
    return int(text)


@declare
class MethodOptions(Options):
    """method"""

    method: str | None = option(
        "; ".join(f"{spec.name}: {spec.about}" for spec in METHODS.values())
        + " (default: the one that the published flags below mean; without any: "
        + _grouped({name: spec.method for name, spec in SPECS.items()}, "with")
        + ")",
        choices=tuple(METHODS),
        unit="NAME",
    )


@declare
class PublishedOptions(Options):
    """published flags of the method

    The released code selects a method by these flags and has no --method. A flag that contradicts --method is
    refused.
    """

    model_type: str | None = option(
        "base: --method ar; eagle: any other method (default: eagle)", choices=("eagle", "base")
    )
    drafter_type: str | None = option(
        "source of the drafts; eagle: the drafter network; none: no drafts (method ar); another name: the "
        "method of that name (default: eagle with --static_tree, --eagle_version, --verify rejection or "
        "--drafter_path, else that of the model's default method)",
        choices=tuple(dict.fromkeys(spec.drafter for spec in METHODS.values())),
    )
    peanut: bool = option(f"ADT-Tree: adaptive trees ({_with_trees(AdaptiveTree)})", False)
    static_tree: bool = option(f"EAGLE-1: a static tree ({_with_trees(StaticTree)})", False)
    eagle_version: int | None = option(
        "lumina_mgpt: 1 means static trees, any other number dynamic ones (default: dynamic)", unit="N"
    )


@declare
class TreeOptions(Options):
    """draft trees"""

    ALIASES: ClassVar[dict[str, str]] = {"drafter_top_k": "draft_top_k"}
    total_token: int | str | None = option(
        "nodes of a dynamic tree, root included; 1: no drafts, which is plain decoding; "
        f"{AUTO}, only for {', '.join(name for name, spec in METHODS.items() if spec.auto)}: the size that "
        "generates most codes per second, found by measuring while decoding. With auto two runs in bf16 or "
        "fp16 may differ where two codes are almost equally probable; with a number they do not (default: "
        f"{AUTO} in {', '.join(name for name, spec in METHODS.items() if spec.auto)} without "
        f"--lantern, --depth and --draft_top_k; else {_by_method('total_token', total_token)})",
        unit="NODES",
        read=_nodes,
    )
    depth: int | None = option(
        "levels of the tree below its root; in self-draft the length of the main chain, which --total_token "
        f"sets without this option (default: {_by_method('depth', lambda tree: tree.depth)})",
        unit="LEVELS",
        least=1,
    )
    draft_top_k: int | None = option(
        "largest number of children of a node, and of nodes of a level that get children; in self-draft the "
        "candidates per cell, in sjd-pac those of each of the first positions "
        f"(default: {_by_method('draft_top_k', lambda tree: tree.width)})",
        unit="NODES",
        least=1,
    )
    tree_choices: str | None = option(
        f"the static tree: {', '.join(STATIC_TREES)} (default: {_by_method('tree_choices', str)})",
        unit="TREE",
    )
    seed_cells: str | None = option(
        "cell from which a draft is copied to a position that no pass of the model has scored yet: "
        + _grouped({m: " or ".join(spec.seed_cells) for m, spec in METHODS.items() if spec.seed_cells})
        + " (default: the first of these)",
        unit="CELL",
    )
    verify: str | None = option(
        "coupled: the AR baseline's image; rejection: the published rules, read by "
        f"{readers('rules')} (default: coupled)",
        choices=VERIFY,
    )
    rules: str | None = option(
        "arithmetic of --verify rejection; reference: as in the released code; fixed: without its errors "
        "(default: fixed)",
        choices=RULES,
    )


def _adaptive(name: str, text: str, unit: str) -> Any:
    """Declares a numeric option of adaptive trees, whose help states the default of each method."""
    defaults = _by_method(f"adt_{name}", lambda tree: f"{getattr(tree, name):g}")
    return option(f"{text} (default: {defaults})", unit=unit)


@declare
class AdaptOptions(Options):
    __doc__ = f"adaptive trees ({_with_trees(AdaptiveTree)})"

    adt_init: str | None = option(
        "decoded cell whose state a tree starts from; horizontal: the left neighbour; vertical: the one "
        f"above; both: the mean of the two; random: any decoded cell (default: {AdaptiveTree().init})",
        choices=INITS,
    )
    adt_beta: float | None = _adaptive("beta", "acceptance rate from which trees deepen", "RATE")
    adt_step_depth: int | None = _adaptive("step_depth", "l_d, change of depth per step", "LEVELS")
    adt_step_width: int | None = _adaptive("step_width", "l_k, change of width per step", "NODES")
    adt_depth_min: int | None = _adaptive("depth_min", "least depth", "LEVELS")
    adt_depth_max: int | None = _adaptive("depth_max", "greatest depth", "LEVELS")
    adt_width_min: int | None = _adaptive("width_min", "least width", "NODES")
    adt_width_max: int | None = _adaptive("width_max", "greatest width", "NODES")
    adt_depth_start: int | None = _adaptive("depth_start", "depth of the first tree", "LEVELS")
    adt_width_start: int | None = _adaptive("width_start", "width of the first tree", "NODES")


@declare
class DecodingOptions(
    ModelOptions,
    SamplingOptions,
    MethodOptions,
    PublishedOptions,
    LanternOptions,
    TreeOptions,
    AdaptOptions,
    RivalOptions,
    RowOptions,
):
    """decoding"""


# Options that some method does not read, in the order in which refusals name them.
LANTERN_VALUES = ("lantern_k", "lantern_delta", "lantern_table")
METHOD_OPTIONS = tuple(
    dict.fromkeys(
        ["drafter_path", "lantern", *LANTERN_VALUES]
        + [name for spec in METHODS.values() for name in sorted(spec.options)]
    )
)


def method_from(options: DecodingOptions, lantern: Lantern = PUBLISHED_LANTERN) -> Method:
    """Returns the method that the options ask for. lantern: what --lantern means without further options.

    Raises UserError for options that contradict one another, and for an option that the method does not read.
    """
    check_model(options)
    spec = selected(options)
    for name, reason in unread(options, spec).items():
        raise UserError(f"{as_written(options, name)}: {reason}")
    values = {"delta": options.lantern_delta, "k": options.lantern_k, "table": options.lantern_table}
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return Method(
        spec.name,
        sampling_of(options, SPECS[options.model]),
        tree_of(options, spec),
        replace(lantern, **changes) if options.lantern else None,
        options.verify or "coupled",
        options.rules or "fixed",
        options.seed_cells,
        relaxed=relaxed_rule(options, spec),
    )


def relaxed_rule(options: DecodingOptions, spec: MethodSpec) -> Relaxed | None:
    """Returns the settings of a relaxed rule, changed by the options; None if the method keeps the
    distribution, or does so without these options."""
    if spec.relaxed is None:
        return None
    given = {name: getattr(options, name) for name in spec.relaxed.options}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(spec.relaxed, **changes) if changes else spec.usual_relaxed


def selected(options: DecodingOptions) -> MethodSpec:
    """Returns the method that --method and the published flags select together.

    Each given flag excludes the methods that do not agree with it. Of the methods left, the result is the
    model's default method if it is among them, else one with the same source of drafts if there is one, and
    of those one whose trees have a fixed shape.
    Raises UserError for a flag that excludes all methods that the flags before it left.
    """
    admits: dict[str, Callable[[MethodSpec], bool]] = {
        "method": lambda spec: spec.name == options.method,
        "model_type": lambda spec: (options.model_type == "base") == (spec.module is None),
        "drafter_type": lambda spec: spec.drafter == options.drafter_type,
        "static_tree": lambda spec: spec.tree_type is StaticTree,
        "eagle_version": lambda spec: (
            spec.network and (options.eagle_version == 1) == (spec.tree_type is StaticTree)
        ),
        "peanut": lambda spec: spec.tree_type is AdaptiveTree,
    }
    if options.method is None:  # otherwise unread() tells whether the method reads these
        admits["drafter_path"] = lambda spec: spec.network
        admits["verify"] = lambda spec: options.verify != "rejection" or options.verify in spec.verify
    left = list(METHODS.values())
    for name, agrees in admits.items():
        written = as_written(options, name)
        if written is None:
            continue
        if not any(agrees(spec) for spec in left):
            meant = ", ".join(spec.name for spec in METHODS.values() if agrees(spec))
            others = ", ".join(spec.name for spec in left)
            raise UserError(f"{written}: it selects {meant}, but other options select {others}; choose one")
        left = [spec for spec in left if agrees(spec)]
    usual = METHODS[SPECS[options.model].method]
    return min(
        left, key=lambda spec: (spec != usual, spec.drafter != usual.drafter, spec.tree_type is not TreeShape)
    )


def unread(options: DecodingOptions, spec: MethodSpec) -> dict[str, str]:
    """Returns the given options that would change nothing under the method, each with the reason."""
    reasons: dict[str, str] = {}
    greedy = sampling_of(options, SPECS[options.model]).greedy
    for name in METHOD_OPTIONS:
        if as_written(options, name) is None:
            continue
        if name in LANTERN_VALUES:
            if not options.lantern:
                reasons[name] = "it needs --lantern"
        elif name not in spec.options:
            reasons[name] = f"method {spec.name} does not read it; leave it out, or choose {readers(name)}"
        elif name in ("depth", "draft_top_k") and options.total_token in (AUTO, 1):
            reasons[name] = (
                f"--total_token {options.total_token} sets the whole shape; give another number of nodes"
            )
        elif name == "rules" and (options.verify != "rejection" or greedy):
            reasons[name] = "it is read with --verify rejection at temperatures above 0"
        elif not takes(spec, name, getattr(options, name)):
            reasons[name] = f"method {spec.name} takes {' or '.join(getattr(spec, name))}"
    return reasons


def takes(spec: MethodSpec, name: str, value: Any) -> bool:
    """Tells whether a method takes this value of an option, or does not read the option."""
    allowed = {"verify": spec.verify, "seed_cells": spec.seed_cells}.get(name, (value,))
    return name not in spec.options or value in allowed


def tree_of(options: DecodingOptions, spec: MethodSpec) -> TreeSettings | None:
    """Returns the model's default tree for the method, changed by the options that are given."""
    if options.total_token == AUTO:
        return AutoTree()
    shaped = options.total_token or options.depth or options.draft_top_k
    auto = not (options.lantern or shaped or options.row_start)
    base = SPECS[options.model].default_tree(spec.name, auto)
    if isinstance(base, AutoTree):
        return base
    budget = None if options.total_token is None else int(options.total_token) - 1  # the root is not drafted
    if isinstance(base, StaticTree):
        return StaticTree(options.tree_choices or base.name)
    if isinstance(base, AdaptiveTree):
        return adaptive_tree(options, base, budget)
    if base is None:
        return None
    assert isinstance(base, TreeShape)
    budget, width = base.budget if budget is None else budget, options.draft_top_k or base.width
    shape = spec.resize(budget, width) if spec.resize else TreeShape(base.depth, width, budget)
    if not budget:
        return replace(shape, depth=0)  # the tree of the root alone
    return replace(shape, depth=options.depth or shape.depth)


def adaptive_tree(options: DecodingOptions, base: AdaptiveTree, budget: int | None) -> AdaptiveTree:
    """Returns the adaptive tree `base`, changed by the options. Raises UserError where they contradict.

    A maximum lowers a default minimum above it, and a default start moves into the bounds: --adt_depth_max 3
    lowers a minimum of 4 and a start of 5 to 3.
    """
    changes = {name.removeprefix("adt_"): getattr(options, name) for name in ADAPTIVE_OPTIONS}
    values = {name: value for name, value in {**changes, "budget": budget}.items() if value is not None}
    for side in ("depth", "width"):
        if f"{side}_max" in values and f"{side}_min" not in values:
            values[f"{side}_min"] = min(values[f"{side}_max"], getattr(base, f"{side}_min"))
        if f"{side}_start" not in values:
            low = values.get(f"{side}_min", getattr(base, f"{side}_min"))
            high = values.get(f"{side}_max", getattr(base, f"{side}_max"))
            values[f"{side}_start"] = max(low, min(high, getattr(base, f"{side}_start")))
    return replace(base, **values)
