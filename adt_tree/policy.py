"""Which tree shape at which cell: fixed (EAGLE-2, EAGLE-1) and adjacency-adaptive (ADT-Tree). No torch
here."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

Cell = tuple[int, int]  # (row, column)
INITS = ("horizontal", "vertical", "both", "random")  # the decoded neighbours a state is repeated from


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Levels below the root, children a node and nodes a level, and drafted nodes in all (root excluded)."""

    depth: int
    width: int
    budget: int

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.budget) < 0:
            raise ValueError(
                f"tree shape {self.depth} x {self.width}, budget {self.budget}: none may be negative"
            )

    def cut(self, levels: int) -> TreeShape:
        """The same shape with at most `levels` levels: no code beyond the image is drafted."""
        return self if self.depth <= levels else TreeShape(levels, self.width, self.budget)


class Policy(Protocol):
    """Chooses a shape for the tree rooted at a cell; learns from what was accepted. One state a slot."""

    def reset(self, slot: int, seed: int) -> None:
        """A new image takes the slot."""

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        """The shape of the tree whose root (the last committed code) lies at cell."""

    def observe(self, slot: int, accepted: int, drafted_depth: int, committed: list[Cell]) -> None:
        """Of drafted_depth levels, `accepted` draft codes were taken; the step committed these cells."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """One shape everywhere: EAGLE-2, and EAGLE-1 with the shape of its static tree."""

    constant: TreeShape

    def reset(self, slot: int, seed: int) -> None:
        """Nothing to forget."""

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        """The constant."""
        return self.constant

    def observe(self, slot: int, accepted: int, drafted_depth: int, committed: list[Cell]) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class AdaptiveTree:
    """Constants of the adaptive tree. The paper publishes none; these are of a sweep on the embedded model
    (docs/LOG.md)."""

    beta: float = 0.5  # acceptance rate from which the tree deepens
    step_depth: int = 1  # l_d, levels
    step_width: int = 1  # l_k, nodes a level
    depth_min: int = 1
    depth_max: int = 8
    width_min: int = 1
    width_max: int = 4
    depth_start: int = 5
    width_start: int = 2
    budget: int = 10  # drafted nodes, root excluded
    init: str = "horizontal"  # one of INITS

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ValueError(f"adt_init {self.init!r}: choose one of {', '.join(INITS)}")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"adt_beta {self.beta}: an acceptance rate lies in [0, 1]")
        for name in ("depth", "width"):
            low, start, high = (getattr(self, f"{name}_{end}") for end in ("min", "start", "max"))
            if not 1 <= low <= start <= high:
                raise ValueError(f"adt {name}: 1 <= min {low} <= start {start} <= max {high} does not hold")
        if self.step_depth < 0 or self.step_width < 0 or self.budget < 1:
            raise ValueError("adt: steps must not be negative and the budget must be positive")

    @property
    def largest(self) -> TreeShape:
        """The greatest depth, width and budget there can be."""
        return TreeShape(self.depth_max, self.width_max, self.budget)


CHAIN = 24  # of self-drafted trees: codes of the main chain beyond which it takes less of the budget
CANDIDATES = 8  # of self-drafted trees: a position
SEED_CELLS = ("above", "left", "both")  # what self-drafting copies where no pass has read
BUDGET = 31  # of self-drafted trees by default: with the root a shape bucket (models.graphs)


def self_drafted(budget: int) -> TreeShape:
    """The fixed shape of a budget (>= 1) of self-drafted nodes: three quarters in the main chain, whose every
    pass refines the drafts of the next, up to CHAIN of them, and half of budgets beyond (docs/LOG.md)."""
    return TreeShape(max(min(CHAIN, -(-3 * budget // 4)), budget // 2), CANDIDATES, budget)


WINDOW_CELLS = ("random", "left")  # what a rival's positions hold before a pass has read them
# Rivals: candidates of a position that has several, and drafted nodes, as published.
WINDOWS = {"sjd": (1, 15), "sjd-coupled": (1, 63), "sjd-pac": (4, 63)}


def beside_chain(width: int, positions: int) -> int:
    """Nodes of a window beside its chain's, where so many positions have `width` (>= 1) candidates each."""
    return sum(width**n - 1 for n in range(1, positions + 1))


def windowed(width: int, budget: int) -> TreeShape:
    """The window of a budget (>= 1) of drafted nodes: `width` candidates for two positions, or as many as the
    budget allows, and a chain of what remains."""
    positions = next(n for n in (2, 1, 0) if budget - beside_chain(width, n) >= max(n, 1))
    return TreeShape(budget - beside_chain(width, positions), width, budget)


# Self-drafting: depth is the length of the main chain. A level costs a row of the target's pass, no drafter
# pass. The update rests at d = ln 2 / (beta ln 1/a), at acceptance a a level: beta 0.5 gives 1.5 to 6 levels
# where a is 0.4 to 0.8; 0.2 gives 4 to 15, the best at this cost. At least 20, as every pass that scores a
# position refines its draft for the next (docs/LOG.md).
SELF_DRAFTED = AdaptiveTree(
    beta=0.2,
    step_depth=2,
    depth_min=20,
    depth_max=28,
    depth_start=24,
    width_min=4,
    width_max=8,
    width_start=6,
    budget=BUDGET,
)


@dataclass(slots=True)
class _Memory:
    """One image's states by cell, and the rate of its last step."""

    random: random.Random
    states: dict[Cell, tuple[int, int]] = field(default_factory=dict)
    current: tuple[int, int] = (0, 0)
    rate: float | None = None


class AdjacencyAdaptive:
    """ADT-Tree (arXiv 2512.21857): start from the adjacent cell's (depth, width), then one bisectional
    update.

    alpha = accepted / depth of the previous tree. alpha >= beta: deeper and narrower; else shallower and
    wider, each clamped to its bounds. The first tree has the start values. All cells a step commits get its
    state.
    """

    def __init__(self, constants: AdaptiveTree, slots: int) -> None:
        self.constants = constants
        self._memory = [_Memory(random.Random(0)) for _ in range(slots)]

    def reset(self, slot: int, seed: int) -> None:
        """Forget the slot's image; the seed drives the random initialisation only."""
        start = (self.constants.depth_start, self.constants.width_start)
        self._memory[slot] = _Memory(random.Random(seed), current=start)

    def shape(self, slot: int, cell: Cell) -> TreeShape:
        """The adjacent state, moved once by the last acceptance rate."""
        memory, constants = self._memory[slot], self.constants
        depth, width = self._adjacent(memory, cell)
        if memory.rate is not None:
            sign = 1 if memory.rate >= constants.beta else -1
            depth = min(max(depth + sign * constants.step_depth, constants.depth_min), constants.depth_max)
            width = min(max(width - sign * constants.step_width, constants.width_min), constants.width_max)
        memory.current = (depth, width)
        return TreeShape(depth, width, constants.budget)

    def observe(self, slot: int, accepted: int, drafted_depth: int, committed: list[Cell]) -> None:
        """Store the step's state in its cells; a step that drafted nothing leaves the rate as it was."""
        memory = self._memory[slot]
        if drafted_depth:
            memory.rate = accepted / drafted_depth
        memory.states.update(dict.fromkeys(committed, memory.current))

    def _adjacent(self, memory: _Memory, cell: Cell) -> tuple[int, int]:
        row, column = cell
        start = (self.constants.depth_start, self.constants.width_start)
        if self.constants.init == "random":
            return memory.random.choice(list(memory.states.values())) if memory.states else start
        above, left = memory.states.get((row - 1, column)), memory.states.get((row, column - 1))
        if self.constants.init == "both" and above and left:
            return (above[0] + left[0] + 1) // 2, (above[1] + left[1] + 1) // 2
        first, second = (above, left) if self.constants.init == "vertical" else (left, above)
        return first or second or start
