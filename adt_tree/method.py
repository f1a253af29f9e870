"""The table of decoding methods, and Method: one of them with its settings. No torch.

A row of METHODS holds all that the program knows of a method, except for the method's arithmetic. Everything
else follows from the rows: the checks below, the engine's choice of proposer and rule, the command line
(choices, defaults, help and refusals), the names that bench takes, and the list on the demo page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from adt_tree.errors import UserError, instance, shown
from adt_tree.fastest_size import AutoTree
from adt_tree.policy import SELF_DRAFTED, AdaptiveTree, Tree, TreeShape, self_drafted, windowed
from adt_tree.sampling import Sampling
from adt_tree.settings import RELAXED as RELAXED
from adt_tree.settings import Annealing, Groups, Lantern, RelaxedRule, Rows, Runs
from adt_tree.static_trees import StaticTree

VERIFY = ("coupled", "rejection")  # "coupled" gives the AR baseline's image; "rejection": the published rules
RULES = ("fixed", "reference")  # arithmetic of "rejection": ours, or the released code's where it differs
CONTROLS = ("accept-none", "accept-all")
LANTERN_SUFFIX = "-lantern"
SHAPE_OPTIONS = ("total_token", "depth", "draft_top_k")
ADAPTIVE_OPTIONS = tuple(f"adt_{item.name}" for item in fields(AdaptiveTree) if item.name != "budget")
ROWS_SUFFIX = "-rows"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One row of the table: what a decoding method is."""

    name: str
    about: str  # one line for --help
    module: str | None = None  # of adt_tree, that drafts; None: the AR baseline
    network: bool = False  # true if it needs the drafter network
    tree: Tree | type | None = None  # default tree, or only its type if it depends on the model family
    tree_options: tuple[str, ...] = ()  # options that change the tree
    resize: Callable[[int, int], TreeShape] | None = None  # (budget, width) -> the default tree of that size
    verify: tuple[str, ...] = ()  # rules that may verify its drafts; () if its proposer is the rule as well
    lantern: bool = False  # true if acceptance can be relaxed (LANTERN)
    seed_cells: tuple[str, ...] = ()  # cells that may be copied to unscored positions; the default first
    auto: bool = False  # true if its trees are sized while decoding unless a size is given
    exact: bool = True  # true if a seed gives the AR baseline's image under the coupled rule
    # The settings of a rule that does not keep the distribution, or only their type if the method keeps it
    # unless it is given such settings.
    relaxed: RelaxedRule | type | None = None
    rival: bool = False  # true for a published method with which bench compares self-draft

    @property
    def tree_type(self) -> type:
        """AdaptiveTree, TreeShape, StaticTree, or NoneType for the AR baseline."""
        return self.tree if isinstance(self.tree, type) else type(self.tree)

    @property
    def relaxed_type(self) -> type:
        """The type of the settings of its relaxed rule; NoneType if it takes none."""
        return self.relaxed if isinstance(self.relaxed, type) else type(self.relaxed)

    @property
    def drafter(self) -> str:
        """The value of the published flag --drafter_type for this method."""
        if self.module is None and self.relaxed is None:
            return "none"
        return "eagle" if self.network and not self.rival else self.name.removeprefix("adt-")

    @property
    def options(self) -> frozenset[str]:
        """The command line's options that this method reads and some other method does not."""
        read = {
            "drafter_path": self.network,
            "lantern": self.lantern,
            "verify": bool(self.verify),
            "rules": "rejection" in self.verify,
            "seed_cells": bool(self.seed_cells),
        }
        rule = {item.name for item in fields(self.relaxed)} if self.relaxed else set()
        if self.module is None:
            rule -= {"row_lag"}  # without drafts a row always keeps its lag
        return frozenset(self.tree_options) | rule | {name for name, reads in read.items() if reads}


EAGLE_2 = MethodSpec(
    "eagle-2",
    "the drafter network grows a tree of fixed depth and width (EAGLE-2)",
    module="adt_tree.proposers.eagle",
    network=True,
    tree=TreeShape,
    tree_options=SHAPE_OPTIONS,
    verify=VERIFY,
    lantern=True,
)
SELF_DRAFT = MethodSpec(
    "self-draft",
    "drafts come from the model's own earlier passes, without a drafter network",
    module="adt_tree.proposers.self_draft",
    tree=self_drafted(31),  # with the root 32 nodes, a number for which graphs are recorded (models.graphs)
    tree_options=SHAPE_OPTIONS,
    resize=self_drafted,
    auto=True,
    verify=("coupled",),  # its drafts share the target's noise, which the published rules do not allow for
    lantern=True,
    seed_cells=("above", "left", "both"),
    relaxed=Rows,
)
SJD = MethodSpec(
    "sjd",
    "speculative Jacobi decoding (2410.01699), exact in distribution but with other images",
    module="lab.rivals.sjd",
    tree=windowed(15, 1),  # the sizes of the rivals are the published ones
    tree_options=("total_token",),  # its drafts are one chain, as long as total_token allows
    resize=windowed,
    seed_cells=("random", "left", "above"),
    exact=False,
    rival=True,
)
METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        MethodSpec("ar", "one code per pass of the model (the AR baseline)"),
        replace(
            EAGLE_2,
            name="eagle-1",
            about="the drafter network fills a static tree (EAGLE-1)",
            tree=StaticTree,
            tree_options=("tree_choices",),
        ),
        EAGLE_2,
        replace(
            EAGLE_2,
            name="adt-tree",
            about="eagle-2 whose depth and width follow the adjacent cell and the acceptance rate (ADT-Tree)",
            tree=AdaptiveTree,
            tree_options=("total_token", *ADAPTIVE_OPTIONS),
        ),
        SELF_DRAFT,
        replace(
            SELF_DRAFT,
            name="adt-self-draft",
            about="self-draft with the adaptive trees of adt-tree",
            tree=SELF_DRAFTED,
            tree_options=("total_token", *ADAPTIVE_OPTIONS),
            resize=None,
            auto=False,
            relaxed=None,
        ),
        SJD,
        replace(
            SJD,
            name="sjd-coupled",
            about="sjd that keeps drafts by maximal coupling (2510.24211)",
            tree=windowed(63, 1),
            module="lab.rivals.sjd_coupled",
        ),
        replace(
            SJD,
            name="sjd-gumbel",
            about="a Jacobi window with noise fixed per position (2510.24211): self-draft without a history",
            module="lab.rivals.sjd_gumbel",
            tree=windowed(63, 1),
            verify=("coupled",),
            exact=True,
        ),
        replace(
            SJD,
            name="sjd-pac",
            about="sjd with several candidates for the first two positions (SJD-PAC, 2603.18599)",
            tree=windowed(63, 4),
            tree_options=SHAPE_OPTIONS,
            module="lab.rivals.sjd_pac",
        ),
        replace(
            SJD,
            name="gsd",
            about="sjd that counts the probability of a group around a draft (GSD, 2508.07747); relaxed",
            module="lab.rivals.gsd",
            relaxed=Groups(),
        ),
        replace(
            SJD,
            name="sjd-sv",
            about="sjd that judges runs of drafts by one joint ratio (SJD-SV, 2609.13245); relaxed",
            module="lab.rivals.sjd_sv",
            relaxed=Runs(),
        ),
        replace(
            SJD,
            name="cool-sjd",
            about="sjd by the rule of cool-sd, a variant of ours; relaxed",
            module="lab.rivals.cool_sjd",
            relaxed=Annealing(),
        ),
        MethodSpec(
            "cool-sd",
            "eagle-1 that relaxes the first levels of its trees most (Cool-SD, 2601.09212); relaxed",
            module="lab.rivals.cool_sd",
            network=True,
            tree=StaticTree,
            tree_options=("tree_choices",),
            exact=False,
            rival=True,
            relaxed=Annealing(),
        ),
        MethodSpec(
            "zipar",
            "ar in several rows at once (ZipAR, 2412.04062), which changes the distribution",
            exact=False,
            rival=True,
            relaxed=Rows(),
        ),
        replace(
            SJD,
            name="pjd",
            about="sjd in several rows at once (PJD, 2606.05703), which changes the distribution",
            tree=windowed(7, 1),
            seed_cells=("random", "left"),
            relaxed=Rows(),
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
        raise UserError(f"method {shown(name)}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


@dataclass(frozen=True, slots=True)
class Method:
    """A row of METHODS with everything that decides an image, except its prompt and seed.

    It is a value: two runs of equal methods, prompts and seeds give the same images. Raises UserError, one
    line, for a setting that the row does not allow.
    """

    name: str
    sampling: Sampling
    tree: Tree | None = None  # of the row's tree_type
    lantern: Lantern | None = None
    verify: str = "coupled"  # one of VERIFY
    rules: str = "fixed"  # one of RULES
    seed_cells: str | None = None  # one of the row's seed_cells; None: the first of them
    control: str | None = None  # one of CONTROLS: a bound that bench measures, not an image
    relaxed: RelaxedRule | None = None  # settings of a relaxed rule; None: those of the row, if it has any

    def __post_init__(self) -> None:
        spec = self.spec
        instance("sampling", self.sampling, Sampling)
        if self.lantern is not None:
            instance("lantern", self.lantern, Lantern)
        if not isinstance(self.tree, spec.tree_type | AutoTree):
            kinds = f"{spec.tree_type.__name__}, not {type(self.tree).__name__}"
            raise UserError(f"tree of method {self.name}: it must be of type {kinds}")
        settings = {
            "verify": (self.verify if self.verify != "coupled" else None, spec.verify),
            "rules": (self.rules, RULES),
            "control": (self.control, CONTROLS),
            "seed_cells": (self.seed_cells, spec.seed_cells),
        }
        for setting, (value, allowed) in settings.items():
            if value is not None and value not in allowed:
                choices = f"choose one of {', '.join(allowed)}" if allowed else "leave it out"
                raise UserError(f"{setting} {value!r}: method {self.name} does not take it; {choices}")
        if self.lantern is not None and not spec.lantern:
            raise UserError(f"lantern: method {self.name} does not take it; leave it out")
        if self.relaxed is not None and type(self.relaxed) is not spec.relaxed_type:
            raise UserError(f"{self.relaxed}: method {self.name} does not take it; leave it out")
        if self.several_rows and self.control:
            raise UserError(
                f"control {self.control}: method {self.name} takes none with several rows at once"
            )
        if isinstance(self.tree, AutoTree):
            self._check_auto()

    def _check_auto(self) -> None:
        if not self.spec.auto:
            names = ", ".join(spec.name for spec in METHODS.values() if spec.auto)
            raise UserError(f"total_token auto: only for {names}, not {self.name}; give a number of nodes")
        if not self.exact:
            raise UserError(
                f"total_token auto: the image of {self.label} depends on its trees, whose size would differ "
                "from run to run; give a number of nodes"
            )

    @property
    def spec(self) -> MethodSpec:
        """The method's row of METHODS. UserError for an unknown name."""
        return method_spec(self.name)

    @property
    def relaxed_rule(self) -> RelaxedRule | None:
        """The settings of its relaxed rule; None if it keeps the distribution."""
        usual = self.spec.relaxed
        return self.relaxed or (None if isinstance(usual, type) else usual)

    @property
    def several_rows(self) -> Rows | None:
        """The settings of several rows at once; None: one row after the other."""
        rule = self.relaxed_rule
        return rule if isinstance(rule, Rows) else None

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
        distribution, as do rivals with a rule of their own; LANTERN, other relaxed rules and controls keep
        neither.
        """
        coupled = self.verify == "coupled" and self.spec.exact
        changed = self.lantern or self.relaxed_rule or self.control
        return not changed and (coupled or self.greedy)

    @property
    def shares_noise(self) -> bool:
        """True if a seed gives it the AR baseline's random numbers, so that equal codes mean equal choices.

        The coupled rule takes them, relaxed or not; at temperature 0 there are none.
        """
        coupled = self.verify == "coupled" and (self.spec.module is None or bool(self.spec.verify))
        return coupled or self.greedy

    @property
    def label(self) -> str:
        """The name, with the suffixes of LANTERN and of several rows, or with the control."""
        suffix, control = LANTERN_SUFFIX if self.lantern else "", f":{self.control}" if self.control else ""
        rows = ROWS_SUFFIX if self.several_rows and not isinstance(self.spec.relaxed, Rows) else ""
        return f"{self.name}{suffix}{rows}{control}"
