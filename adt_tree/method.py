"""What is decoded and how: a method by its name, and the decoder that carries it out on a model.

A method is a value: two runs of equal methods, prompts and seeds give the same images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.eagle import EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.grid import Grid
from adt_tree.hybrid import HybridProposer
from adt_tree.noise import Noise
from adt_tree.policy import AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.rivals import SEED_CELLS as WINDOW_CELLS
from adt_tree.rivals import JacobiWindow, couple, product_tree, redraw
from adt_tree.roles import Drafter, Proposer, Request, Target
from adt_tree.sampling import Sampling
from adt_tree.self_draft import SEED_CELLS, SelfDraftProposer
from adt_tree.tree import STATIC_TREES, StaticTree
from adt_tree.verify import Control, Coupled, GreedyRelaxed, Rejection, Rule

# method -> who drafts: nobody, the EAGLE network, the target's earlier passes, the last two together, or a
# rival's window
METHODS = {
    "ar": "none",
    "eagle-1": "eagle",
    "eagle-2": "eagle",
    "adt-tree": "eagle",
    "self-draft": "self-draft",
    "adt-self-draft": "self-draft",
    "hybrid": "hybrid",
    "adt-hybrid": "hybrid",
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
        if self.verify == "rejection" and self.drafter in ("self-draft", "hybrid"):
            raise ValueError(
                f"method {self.name} with verify rejection: its drafts share the target's noise, so only the "
                "coupled rule may test them"
            )
        if self.drafter == "window" and (self.lantern or self.verify == "rejection"):
            raise ValueError(f"method {self.name}: its rule is its own; leave lantern and verify out")

    @property
    def drafter(self) -> str:
        """Who drafts: none, eagle, self-draft, hybrid or window."""
        return METHODS[self.name]

    @property
    def drafting(self) -> bool:
        """Whether there are draft trees."""
        return self.tree is not None

    @property
    def needs_drafter(self) -> bool:
        """Whether a drafter network drafts."""
        return self.drafter in ("eagle", "hybrid")

    @property
    def seeds(self) -> str:
        """What drafts of positions never seen are unless seed_cells says so: random in a window, else the
        code above."""
        return self.seed_cells or ("random" if self.drafter == "window" else "above")

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


class Model(Protocol):
    """What a decoder takes from a loaded model."""

    @property
    def grid(self) -> Grid:
        """Rows and columns of an image."""

    @property
    def codebook(self) -> Tensor:
        """Latents of the codes [V, C]."""

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> Target:
        """A target with room for so many images, nodes of a tree and prompt tokens."""

    def drafter(self, target: Any, max_depth: int, max_width: int) -> Drafter:
        """The drafter beside that target."""

    def nearest(self, k: int, table: Path | None) -> Tensor:
        """Nearest-latent table [V, k] int64."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Everything one method needs on one model; drafting is None in the AR baseline."""

    method: Method
    sampling: Sampling
    target: Target
    drafting: tuple[Proposer, Policy, Rule] | None = None

    def steps(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Every target call, as it happens."""
        if self.drafting is None:
            noise = Noise(self.target.num_codes, silent=self.sampling.greedy)
            return autoregressive(self.target, requests, self.sampling, noise)
        return speculative(self.target, *self.drafting, requests, self.sampling)

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Finished images, as they finish."""
        return finished(self.steps(requests))


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Decoder:
    """The decoder of a method with room for `slots` images in flight and prompts of max_prompt tokens.

    ValueError if the model's codebook is too small for the method's trees or neighbours.
    """
    sampling = replace(method.sampling, top_p_first=method.rules == "reference")
    if method.tree is None:
        return Decoder(method, sampling, model.target(slots, sampling, 1, max_prompt))
    tree = StaticTree(STATIC_TREES[method.tree]) if isinstance(method.tree, str) else method.tree
    static = tree if isinstance(tree, StaticTree) else None
    shape = largest_shape(tree, model.num_codes)
    target = model.target(slots, sampling, shape.budget + 1, max_prompt)
    proposer = _proposer(model, method, target, sampling, shape, static)
    policy: Policy = Fixed(shape)
    if isinstance(tree, AdaptiveTree):
        policy = AdjacencyAdaptive(tree, slots)
    if isinstance(proposer, JacobiWindow) and not method.control:
        rule: Rule = proposer  # a window judges what it drafts
    else:
        rule = _rule(model, method, static)
    return Decoder(method, sampling, target, (proposer, policy, rule))


def largest_shape(tree: TreeShape | AdaptiveTree | StaticTree, num_codes: int) -> TreeShape:
    """The greatest depth, width and budget of a method's trees. ValueError if the codebook is smaller."""
    shape = tree if isinstance(tree, TreeShape) else tree.largest
    if shape.width > num_codes:
        raise ValueError(
            f"a tree {shape.width} nodes wide: the codebook has {num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    return shape


def _proposer(
    model: Model,
    method: Method,
    target: Target,
    sampling: Sampling,
    shape: TreeShape,
    static: StaticTree | None,
) -> Proposer:
    """Who drafts, with room for trees of `shape`."""
    slots, device = target.slots, target.device
    if method.drafter == "eagle":
        drafter = model.drafter(target, shape.depth, shape.width)
        keep_q = method.verify == "rejection" and not method.greedy
        growth = grow_dynamic if static is None else StaticGrowth(static, keep_q, device)
        return EagleProposer(drafter, sampling, growth, slots)
    if method.drafter == "window":
        tail = redraw if method.name == "sjd" else couple
        tree = StaticTree(product_tree(shape))
        return JacobiWindow(tree, tail, target, method.greedy, method.seeds)
    own = SelfDraftProposer(model.grid, slots, shape.width, method.seeds, model.num_codes, device)
    if method.drafter == "self-draft":
        return own
    drafter = model.drafter(target, shape.depth, shape.width)
    return HybridProposer(own, EagleProposer(drafter, sampling, grow_dynamic, slots))


def _rule(model: Model, method: Method, static: StaticTree | None) -> Rule:
    """The verification rule; greedy decoding without relaxation is coupled with silent noise."""
    noise = Noise(model.num_codes, silent=method.greedy)
    if method.control is not None:
        return Control(noise, accept=method.control == "accept-all")
    relaxation = None
    if method.lantern is not None:
        k = method.lantern.neighbours(model.num_codes)
        table = Path(method.lantern.table) if method.lantern.table else None
        relaxation = Relaxation(model.nearest(k + 1, table), k, method.lantern.delta)
    if method.greedy and relaxation is not None:
        order = None if static is None else torch.tensor(static.row_order, device=model.codebook.device)
        return GreedyRelaxed(model.num_codes, relaxation, order)
    if method.greedy or method.verify == "coupled":
        return Coupled(noise, relaxation)
    return Rejection(model.num_codes, static is not None, relaxation, reference=method.rules == "reference")
