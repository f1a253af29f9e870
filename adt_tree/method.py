"""The table of decoding methods, and Method: one of them with its settings.

A row of METHODS holds all that the program knows of a method, except for the method's arithmetic. Everything
else follows from the rows: the checks below, the engine's choice of proposer and rule, the command line
(choices, defaults, help and refusals), the names that bench takes, and the list on the demo page. `lab` adds
rows when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import ClassVar

from adt_tree.errors import UserError, instance, shown
from adt_tree.fastest_size import AutoTree
from adt_tree.policy import SELF_DRAFTED, AdaptiveTree, TreeSettings, TreeShape, self_drafted
from adt_tree.settings import Lantern, Sampling
from adt_tree.static_trees import StaticTree

VERIFY = ("coupled", "rejection")  # "coupled" gives the AR baseline's image; "rejection": the published rules
RULES = ("fixed", "reference")  # arithmetic of "rejection": ours, or the released code's where it differs
LANTERN_SUFFIX = "-lantern"
# Start, greatest width and budget of the released code's tree; the rest as tuned on the embedded model.
RELEASED_ADAPTIVE = AdaptiveTree(depth_start=5, width_start=10, width_max=10, budget=58)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Settings with which a method does not keep the model's distribution. `lab` has them.

    Subclasses are frozen dataclasses: equal settings make equal images, and str() is a part of a run's
    fingerprint.
    """

    module: ClassVar[str | None] = None  # whose build() makes the engine; None: one that decodes as usual
    raster_order: ClassVar[bool] = True  # the codes of an image are committed one after the other

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings that a user may change."""
        return tuple(item.name for item in fields(self))

    @property
    def suffix(self) -> str:
        """The end of a method's label where the method keeps the distribution without these settings."""
        return ""

    def fits(self, spec: MethodSpec) -> bool:
        """True if the method of that row takes these settings."""
        return type(spec.relaxed) is type(self)


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One row of the table: what a decoding method is."""

    name: str
    about: str  # one line for --help
    module: str | None = None  # that drafts; None: the AR baseline
    network: bool = False  # true if it needs the drafter network
    tree: TreeSettings | None = None  # default tree; with a drafter network a family may have another one
    chain: bool = False  # its trees are chains, which the budget alone shapes
    resize: Callable[[int, int], TreeShape] | None = None  # (budget, width) -> the default tree of that size
    verify: tuple[str, ...] = ()  # rules that may verify its drafts; () if its proposer is the rule as well
    lantern: bool = False  # true if acceptance can be relaxed (LANTERN)
    seed_cells: tuple[str, ...] = ()  # cells that may be copied to unscored positions; the default first
    auto: bool = False  # true if its trees are sized while decoding unless a size is given
    exact: bool = True  # true if a seed gives the AR baseline's image under the coupled rule
    # Default settings of a rule that does not keep the distribution. An exact row keeps it unless it is given
    # such settings.
    relaxed: Relaxed | None = None

    @property
    def usual_relaxed(self) -> Relaxed | None:
        """The settings of a relaxed rule where none are given; None: it keeps the distribution."""
        return None if self.exact else self.relaxed

    @property
    def settings(self) -> frozenset[str]:
        """The settings that this method reads and some other method does not, by the names of messages."""
        read = {
            "drafter_path": self.network,
            "lantern": self.lantern,
            "verify": bool(self.verify),
            "rules": "rejection" in self.verify,
            "seed_cells": bool(self.seed_cells),
        }
        names = [item.name for item in fields(self.tree)] if is_dataclass(self.tree) else []
        if self.chain:
            names = ["budget"]
        relaxed = self.relaxed.settings if self.relaxed else ()
        of_tree = (f"tree.{name}" for name in names)
        return frozenset((*of_tree, *relaxed)) | {name for name, reads in read.items() if reads}


EAGLE_2 = MethodSpec(
    "eagle-2",
    "the drafter network grows a tree of fixed depth and width (EAGLE-2)",
    module="adt_tree.proposers.eagle",
    network=True,
    tree=TreeShape(5, 10, 58),  # that of the released code
    verify=VERIFY,
    lantern=True,
)
SELF_DRAFT = MethodSpec(
    "self-draft",
    "drafts come from the model's own earlier passes, without a drafter network",
    module="adt_tree.proposers.self_draft",
    tree=self_drafted(31),  # with the root 32 nodes, a number for which graphs are recorded (models.graphs)
    resize=self_drafted,
    auto=True,
    verify=("coupled",),  # its drafts share the target's noise, which the published rules do not allow for
    lantern=True,
    seed_cells=("above", "left", "both"),
)
METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        MethodSpec("ar", "one code per pass of the model (the AR baseline)"),
        replace(
            EAGLE_2,
            name="eagle-1",
            about="the drafter network fills a static tree (EAGLE-1)",
            tree=StaticTree("mc_sim_7b_63"),
        ),
        EAGLE_2,
        replace(
            EAGLE_2,
            name="adt-tree",
            about="eagle-2 whose depth and width follow the adjacent cell and the acceptance rate (ADT-Tree)",
            tree=RELEASED_ADAPTIVE,
        ),
        SELF_DRAFT,
        replace(
            SELF_DRAFT,
            name="adt-self-draft",
            about="self-draft with the adaptive trees of adt-tree",
            tree=SELF_DRAFTED,
            resize=None,
            auto=False,
        ),
    )
}


def all_names() -> tuple[str, ...]:
    """Returns the names of all methods, and with LANTERN's suffix those that take it."""
    return (*METHODS, *(name + LANTERN_SUFFIX for name, spec in METHODS.items() if spec.lantern))


def split_name(name: str) -> tuple[str, bool]:
    """Returns the name of a method without LANTERN's suffix, and whether it had the suffix."""
    plain = name.removesuffix(LANTERN_SUFFIX)
    return plain, plain != name


def method_spec(name: str) -> MethodSpec:
    """Returns the row of that name. UserError if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        hint = "" if "lab" in sys.modules else "; `import lab` adds rivals"
        raise UserError(f"method {shown(name)}: choose one of {', '.join(METHODS)}{hint}")
    return METHODS[name]


@dataclass(frozen=True, slots=True)
class Method:
    """A row of METHODS with everything that decides an image, except its prompt and seed.

    It is a value: two runs of equal methods, prompts and seeds give the same images. Raises UserError, one
    line, for a setting that the row does not allow.
    """

    name: str
    sampling: Sampling
    tree: TreeSettings | None = None  # of the type of the row's tree
    lantern: Lantern | None = None
    verify: str = "coupled"  # one of VERIFY
    rules: str = "fixed"  # one of RULES
    seed_cells: str | None = None  # one of the row's seed_cells; None: the first of them
    relaxed: Relaxed | None = None  # None: the row's usual_relaxed

    def __post_init__(self) -> None:
        spec = self.spec
        instance("sampling", self.sampling, Sampling)
        if self.lantern is not None:
            instance("lantern", self.lantern, Lantern)
        if not isinstance(self.tree, (type(spec.tree), AutoTree)):
            kinds = f"{type(spec.tree).__name__}, not {type(self.tree).__name__}"
            raise UserError(f"tree of method {self.name}: it must be of type {kinds}")
        settings = {
            "verify": (self.verify if self.verify != "coupled" else None, spec.verify),
            "rules": (self.rules, RULES),
            "seed_cells": (self.seed_cells, spec.seed_cells),
        }
        for setting, (value, allowed) in settings.items():
            if value is not None and value not in allowed:
                choices = f"choose one of {', '.join(allowed)}" if allowed else "leave it out"
                raise UserError(f"{setting} {value!r}: method {self.name} does not take it; {choices}")
        if self.lantern is not None and not spec.lantern:
            raise UserError(f"lantern: method {self.name} does not take it; leave it out")
        if self.relaxed is not None:
            instance("relaxed", self.relaxed, Relaxed)
            if not self.relaxed.fits(spec):
                raise UserError(f"{self.relaxed}: method {self.name} does not take it; leave it out")
        if isinstance(self.tree, AutoTree):
            self._check_auto()

    def _check_auto(self) -> None:
        if not self.spec.auto:
            names = ", ".join(spec.name for spec in METHODS.values() if spec.auto)
            raise UserError(f"tree auto: only for {names}, not {self.name}; give a number of nodes")
        if not self.exact:
            raise UserError(
                f"tree auto: the image of {self.label} depends on its trees, whose size would differ "
                "from run to run; give a number of nodes"
            )

    @property
    def spec(self) -> MethodSpec:
        """The method's row of METHODS. UserError for an unknown name."""
        return method_spec(self.name)

    @property
    def relaxed_rule(self) -> Relaxed | None:
        """The settings of its relaxed rule; None if it keeps the distribution."""
        return self.relaxed or self.spec.usual_relaxed

    @property
    def raster_order(self) -> bool:
        """True if the codes of an image are committed one after the other."""
        return self.relaxed_rule is None or self.relaxed_rule.raster_order

    @property
    def ordered_sampling(self) -> Sampling:
        """Its sampling, with the filters in the order of its rules."""
        return replace(self.sampling, top_p_first=self.rules == "reference")

    @property
    def drafting(self) -> bool:
        """True if the method drafts. The AR baseline does not, nor a method whose trees have one node."""
        return self.tree is not None and self.tree.largest.levels > 0

    @property
    def copied_cells(self) -> str:
        """The cells from which drafts are copied to positions that no pass has scored: seed_cells, or the
        default of the row; empty if the method copies none."""
        return self.seed_cells or next(iter(self.spec.seed_cells), "")

    @property
    def greedy(self) -> bool:
        """True if the most probable code is taken instead of a sample."""
        return self.sampling.greedy

    @property
    def greedy_rule_differs(self) -> bool:
        """True if greedy images are verified by another rule than sampled ones, so that the two cannot share
        an engine."""
        if self.lantern is not None or self.verify != "coupled":
            return True
        return self.drafting and not self.spec.verify

    @property
    def exact(self) -> bool:
        """True if a seed gives the AR baseline's image, code for code.

        Under the coupled rule it does, and under every rule at temperature 0. Rejection keeps only the
        distribution, as do rivals with a rule of their own; LANTERN and other relaxed rules keep neither.
        """
        coupled = self.verify == "coupled" and self.spec.exact
        changed = self.lantern or self.relaxed_rule
        return not changed and (coupled or self.greedy)

    @property
    def label(self) -> str:
        """The name, with the suffixes of LANTERN and of relaxed settings that the row does not imply."""
        lantern = LANTERN_SUFFIX if self.lantern else ""
        relaxed = self.relaxed.suffix if self.relaxed and not self.spec.usual_relaxed else ""
        return f"{self.name}{lantern}{relaxed}"
