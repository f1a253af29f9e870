"""What is decoded and how: a method by its name. No torch.

A method is a value: two runs of equal methods, prompts and seeds give the same images.
"""

from __future__ import annotations

from dataclasses import dataclass

from adt_tree.policy import SEED_CELLS, WINDOW_CELLS, AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES

# method -> who drafts: nobody, the EAGLE network, the target's earlier passes, or a rival's window
METHODS = {
    "ar": "none",
    "eagle-1": "eagle",
    "eagle-2": "eagle",
    "adt-tree": "eagle",
    "self-draft": "self-draft",
    "adt-self-draft": "self-draft",
    "sjd": "window",
    "sjd-coupled": "window",
    "sjd-pac": "window",
}
VERIFY = ("coupled", "rejection")
RULES = ("fixed", "reference")
CONTROLS = ("accept-none", "accept-all")
LANTERN_SUFFIX = "-lantern"


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxed acceptance (2410.03355): the budget delta and the neighbours k that count.

    k None: `most`, or an eighth of a smaller codebook. table: a file or folder of nearest codes; None: the
    model's own.
    """

    delta: float = 0.1
    k: int | None = None
    most: int = 1000
    table: str | None = None

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ValueError(f"lantern_delta {self.delta}: it must not be negative")
        if self.k is not None and self.k < 0:
            raise ValueError(f"lantern_k {self.k}: it must not be negative")

    def neighbours(self, num_codes: int) -> int:
        """k for a codebook of that size. ValueError if it has fewer neighbours than are asked for."""
        if self.k is None:
            return min(self.most, num_codes // 8)
        if self.k > num_codes - 2:
            raise ValueError(
                f"lantern_k {self.k}: the codebook has {num_codes} codes; give at most {num_codes - 2}"
            )
        return self.k


RELAXED = Lantern(delta=0.5, most=100)  # of bench and the page: the published values often change nothing


@dataclass(frozen=True, slots=True)
class Method:
    """A name of METHODS with the distribution it samples, its trees and its verification rule.

    tree: None for ar, the name of a static tree for eagle-1, AdaptiveTree for adt-*, TreeShape for the
    others. Raises ValueError, one line, for what cannot be combined.
    """

    name: str
    sampling: Sampling
    tree: TreeShape | AdaptiveTree | str | None = None
    lantern: Lantern | None = None
    verify: str = "coupled"  # or "rejection": the published rules
    rules: str = "fixed"  # or "reference": the released code's arithmetic where it differs
    seed_cells: str | None = None  # where drafts of positions never seen are copied from; None: see `seeds`
    control: str | None = None  # one of CONTROLS: a bound, not an image

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"method {self.name!r}: choose one of {', '.join(METHODS)}")
        kinds: dict[str, type] = {"ar": type(None), "eagle-1": str}
        kind = kinds.get(self.name, AdaptiveTree if self.name.startswith("adt-") else TreeShape)
        if not isinstance(self.tree, kind):
            raise ValueError(
                f"method {self.name}: its tree is a {kind.__name__}, not a {type(self.tree).__name__}"
            )
        if isinstance(self.tree, str) and self.tree not in STATIC_TREES:
            raise ValueError(f"static tree {self.tree!r}: choose one of {', '.join(STATIC_TREES)}")
        cells = WINDOW_CELLS if self.drafter == "window" else SEED_CELLS
        for value, allowed, what in (
            (self.verify, VERIFY, "verify"),
            (self.rules, RULES, "rules"),
            (self.control, (None, *CONTROLS), "control"),
            (self.seed_cells, (None, *cells), "seed_cells"),
        ):
            if value not in allowed:
                raise ValueError(f"{what} {value!r}: choose one of {', '.join(filter(None, allowed))}")
        if self.name == "ar" and (self.lantern or self.verify == "rejection"):
            raise ValueError("method ar: it has no drafts to verify; leave lantern and verify out")
        if self.verify == "rejection" and self.drafter == "self-draft":
            raise ValueError(
                f"method {self.name} with verify rejection: its drafts share the target's noise, so only the "
                "coupled rule may test them"
            )
        if self.drafter == "window" and (self.lantern or self.verify == "rejection"):
            raise ValueError(f"method {self.name}: its rule is its own; leave lantern and verify out")

    @property
    def drafter(self) -> str:
        """Who drafts: none, eagle, self-draft or window."""
        return METHODS[self.name]

    @property
    def drafting(self) -> bool:
        """Whether there are draft trees."""
        return self.tree is not None

    @property
    def needs_drafter(self) -> bool:
        """Whether a drafter network drafts."""
        return self.drafter == "eagle"

    @property
    def seeds(self) -> str:
        """What drafts of positions never seen are unless seed_cells says so: random in a window, else the
        code above."""
        return self.seed_cells or (WINDOW_CELLS if self.drafter == "window" else SEED_CELLS)[0]

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken instead of a sample."""
        return self.sampling.greedy

    @property
    def exact(self) -> bool:
        """Whether one seed gives the AR baseline's image: coupled or greedy rule, nothing relaxed. Rejection
        keeps the distribution alone, and so do windows, which have it for a rule."""
        coupled = self.verify == "coupled" and self.drafter != "window"
        return not self.lantern and not self.control and (coupled or self.greedy)

    @property
    def label(self) -> str:
        """The name, with LANTERN's suffix or the control."""
        relaxed, bound = LANTERN_SUFFIX if self.lantern else "", f":{self.control}" if self.control else ""
        return f"{self.name}{relaxed}{bound}"
