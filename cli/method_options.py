"""The options of the method, and the checked Method that they ask for. This file does not import torch.

The row of a method (adt_tree.method.METHODS) says which options it reads and what its defaults are. An option
that would change nothing under the chosen method is refused, so that no flag is silently ignored.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from adt_tree.fastest_size import AutoTree
from adt_tree.method import METHODS, RULES, VERIFY, Method, MethodSpec, Relaxed
from adt_tree.policy import INITS, AdaptiveTree, TreeSettings, TreeShape
from adt_tree.static_trees import STATIC_TREES, StaticTree
from cli.flags import ADAPTIVE, read_by
from cli.options import FilterOptions, ModelOptions, SamplingOptions, by_model, sampling_of
from lab.settings import Annealing, Groups, Runs
from models.family import PUBLISHED_LANTERN as USUAL
from models.family import ModelFamily
from models.registry import SPECS
from storage.command_line import CommandOptions, as_written, declare, option

LANTERN_VALUES = ("lantern_k", "lantern_delta", "lantern_table")
# Options that some method does not read.
METHOD_OPTIONS = tuple(dict.fromkeys(name for spec in METHODS.values() for name in read_by(spec)))
FLAGS = ("model_type", "peanut", "static_tree", "eagle_version")  # the released code has no --method
BY_TREES = {  # kind of trees -> the method that drafts by the drafter network, and the one that does without
    TreeShape: ("eagle-2", "self-draft"),
    StaticTree: ("eagle-1", "eagle-1"),
    AdaptiveTree: ("adt-tree", "adt-self-draft"),
}
AUTO = "auto"  # value of --total_token: the size of trees is chosen while decoding


def readers(name: str) -> str:
    """Returns the names of the methods that read an option."""
    return ", ".join(spec.name for spec in METHODS.values() if name in read_by(spec))


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
    readers = [spec.name for spec in METHODS.values() if name in read_by(spec)]
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
    return ", ".join(spec.name for spec in METHODS.values() if type(spec.tree) is kind)


def _nodes(text: str) -> int | str:
    """Reads --total_token: auto, or a number of nodes of at least 1, which is the root alone."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of nodes; give 1 or more, or {AUTO}")
    if int(text) < 1:
        raise ArgumentTypeError(f"{text} is too small: give 1 or more, or {AUTO}")
    return int(text)


@declare("method")
class MethodOptions:
    """A method, by its name or by the published flags."""

    method: str | None = option(
        "; ".join(f"{spec.name}: {spec.about}" for spec in METHODS.values())
        + " (default: the one that the published flags mean; without any: "
        + _grouped({name: spec.method for name, spec in SPECS.items()}, "with")
        + ")",
        choices=tuple(METHODS),
        unit="NAME",
        reads={False: FLAGS},
    )

    model_type: str | None = option(
        "base: method ar; eagle: a method that drafts (default: eagle)",
        choices=("eagle", "base"),
        reads={False: FLAGS[1:], "eagle": FLAGS[1:]},
    )
    peanut: bool = option(
        f"ADT-Tree: adaptive trees ({_with_trees(AdaptiveTree)})", False, reads={False: ("static_tree",)}
    )
    static_tree: bool = option("EAGLE-1: a static tree", False)
    eagle_version: int | None = option(
        "lumina_mgpt: 1 means static trees, any other number dynamic ones (default: dynamic)",
        unit="N",
    )


@declare("draft trees", {"drafter_top_k": "draft_top_k"})
class TreeOptions:
    """Draft trees, and how they are verified."""

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
        reads={"rejection": ("rules",)},
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


@declare(f"adaptive trees ({_with_trees(AdaptiveTree)})")
class AdaptOptions:
    """Adaptive trees."""

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


@declare("relaxed acceptance (LANTERN)")
class LanternOptions:
    """The settings of relaxed acceptance."""

    lantern_k: int | None = option(
        f"number of neighbours whose probability counts (default: {USUAL.max_k}"
        f"{by_model(USUAL.max_k, lambda spec: spec.lantern.max_k)}; or an eighth of the codebook if that is "
        "less)",
        unit="CODES",
    )
    lantern_delta: float | None = option(
        "up to 1: bound on the probability that a code gains from its neighbours; above 1: LANTERN++'s "
        f"factor on the probability of the code itself (default: {USUAL.delta:g}"
        f"{by_model(USUAL.delta, lambda spec: spec.lantern.delta)})",
        unit="D",
    )
    lantern_table: str | None = option(
        "table of nearest codes, top_{V - 1}_indices.npy or its folder (default: the one in the checkpoint's "
        "or drafter's folder or in ckpts/MODEL/vq_distances, else computed from the codebook)",
        unit="PATH",
    )


@declare("relaxed acceptance (LANTERN)")
class LanternSwitch:
    """Relaxed acceptance."""

    lantern: bool = option(
        "count the probability of a code's nearest neighbours when it is verified, so that more codes are "
        f"accepted: faster, but not the model's distribution; read by {readers('lantern')}",
        False,
        reads={True: LANTERN_VALUES},
    )


@declare("rivals, and several rows at once")
class LabOptions:
    """The settings of what is measured beside the library."""

    gsd_group: int | None = option(
        "G: codes of neighbouring rank whose probability a draft of gsd counts; 1: sjd (default: "
        f"{Groups().gsd_group})",
        unit="CODES",
    )
    gsd_gap: float | None = option(
        f"largest difference of their probabilities from the draft's (default: {Groups().gsd_gap:g})",
        unit="P",
    )
    gsd_distance: float | None = option(
        "largest squared distance of their input embeddings from the draft's; released for Lumina-mGPT: 0.5 "
        "(default: the median of the model's codes)",
        unit="D",
    )
    sv_mass: float | None = option(
        "alpha: share of a run's summed probability that the judged tail of a run of sjd-sv has (default: "
        f"{Runs().sv_mass:g})",
        unit="SHARE",
    )
    sv_run: int | None = option(
        "most drafts that sjd-sv judges by one ratio; 1: sjd (default: no bound)", unit="DRAFTS"
    )
    cool_delta: float | None = option(
        "mean over the levels of the weights with which cool-sd and cool-sjd multiply the probability of a "
        f"draft (default: {Annealing().cool_delta:g})",
        unit="D",
    )
    cool_nu: float | None = option(
        "those weights fall by the factor exp(-nu) from level to level; 0 with --cool_delta 1: the exact "
        f"method (default: {Annealing().cool_nu:g})",
        unit="NU",
    )
    row_start: int | None = option(
        f"{readers('row_start')}: begin a row when the row above it has this many cells, its row end "
        "included; fewer give fewer passes and another distribution, a whole row gives raster order "
        "(default: a third of a row in zipar and pjd, raster order in the others)",
        unit="CELLS",
    )


@declare("decoding")
class MethodSettings(ModelOptions, FilterOptions, LanternOptions, TreeOptions, AdaptOptions, LabOptions):
    """What bench and generate_images share: a model, and the settings of methods."""


@declare("decoding")
class DecodingOptions(MethodSettings, SamplingOptions, MethodOptions, LanternSwitch, CommandOptions):
    """Everything that decides an image, except for its prompt and seed."""

    def unread(self) -> dict[str, str]:
        """Returns the given options that would change nothing under the method, each with the reason."""
        spec, reasons = METHODS[selected(self)], super().unread()
        for name in METHOD_OPTIONS:
            if name not in read_by(spec):
                reasons[name] = f"it belongs to --method {readers(name)}"
            elif not takes(spec, name, getattr(self, name)):
                reasons[name] = f"method {spec.name} takes {' or '.join(getattr(spec, name))}"
        if self.total_token in (AUTO, 1):
            shape = f"--total_token {self.total_token} sets the whole shape"
            reasons |= dict.fromkeys(("depth", "draft_top_k"), shape)
        if sampling_of(self, SPECS[self.model]).greedy:
            reasons.setdefault("rules", "it belongs to temperatures above 0")
        if self.eagle_version is not None:
            other, trees = ("peanut", "static") if self.eagle_version == 1 else ("static_tree", "dynamic")
            reasons.setdefault(other, f"--eagle_version {self.eagle_version} means {trees} trees")
        return {name: reason for name, reason in reasons.items() if as_written(self, name)}


def method_from(options: DecodingOptions, family: ModelFamily | None = None) -> Method:
    """Returns the method that the options ask for.

    family: whose defaults stand for options that are left out, such as a loaded checkpoint's; None: that of
    --model. Raises UserError for options that contradict one another.
    """
    spec, family = METHODS[selected(options)], family or SPECS[options.model]
    values = {"delta": options.lantern_delta, "k": options.lantern_k, "table": options.lantern_table}
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return Method(
        spec.name,
        sampling_of(options, family),
        tree_of(options, spec),
        replace(family.lantern, **changes) if options.lantern else None,
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
    given = {name: getattr(options, name) for name in spec.relaxed.settings}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(spec.relaxed, **changes) if changes else spec.usual_relaxed


def selected(options: DecodingOptions) -> str:
    """Returns the method that --method, or else the published flags, select."""
    if options.method is not None:
        return options.method
    if options.model_type == "base":
        return "ar"
    static = options.static_tree or options.eagle_version == 1
    kind = AdaptiveTree if options.peanut else StaticTree if static else TreeShape
    network = options.drafter_path or options.verify == "rejection" or options.eagle_version is not None
    return BY_TREES[kind][0 if network or METHODS[SPECS[options.model].method].network else 1]


def takes(spec: MethodSpec, name: str, value: Any) -> bool:
    """Tells whether a method takes this value of an option, or does not read the option."""
    allowed = {"verify": spec.verify, "seed_cells": spec.seed_cells}.get(name, ())
    return value is None or not allowed or value in allowed


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
    changes = {name: getattr(options, f"adt_{name}") for name in ADAPTIVE}
    values = {name: value for name, value in {**changes, "budget": budget}.items() if value is not None}
    for side in ("depth", "width"):
        if f"{side}_max" in values and f"{side}_min" not in values:
            values[f"{side}_min"] = min(values[f"{side}_max"], getattr(base, f"{side}_min"))
        if f"{side}_start" not in values:
            low = values.get(f"{side}_min", getattr(base, f"{side}_min"))
            high = values.get(f"{side}_max", getattr(base, f"{side}_max"))
            values[f"{side}_start"] = max(low, min(high, getattr(base, f"{side}_start")))
    return replace(base, **values)
