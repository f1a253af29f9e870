"""The shapes of draft trees, and the policies that choose one at each cell of the image."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from adt_tree.errors import UserError, integer, real, store
from adt_tree.grid import Cell, Grid
from adt_tree.records import Step

INITS = ("horizontal", "vertical", "both", "random")  # the decoded cell whose state a tree starts from


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The size of a draft tree."""

    depth: int  # levels below the root
    width: int  # most children of a node, and most nodes that are expanded on a level
    budget: int  # most drafted nodes; the root is not counted

    def __post_init__(self) -> None:
        names = ("depth", "width", "budget")
        store(self, {name: integer(f"tree.{name}", getattr(self, name)) for name in names})

    @property
    def levels(self) -> int:
        """Number of levels that the tree can have: 0 if it has no room for a node."""
        return self.depth if min(self.width, self.budget) else 0

    @property
    def num_nodes(self) -> int:
        """Most nodes of the tree: the drafted ones and the root."""
        return self.budget + 1

    @property
    def largest(self) -> TreeShape:
        return self

    def policy(self, grid: Grid, slots: int, on_gpu: bool) -> Fixed:
        return Fixed(self)

    def cut(self, levels: int) -> TreeShape:
        """Returns the shape with at most `levels` levels, so that no code beyond the image is drafted."""
        return self if self.depth <= levels else TreeShape(levels, self.width, self.budget)


ROOT_ONLY = TreeShape(0, 0, 0)  # of the AR baseline, of idle slots and of images at their last position
SMALLEST = TreeShape(1, 1, 1)  # one drafted node


class TreeSettings(Protocol):
    """The settings of a method's trees, which make their policy. A TreeShape and a StaticTree are fixed; an
    AdaptiveTree changes its shape from cell to cell, and an AutoTree its size from image to image.

    They are values: str() of equal ones is equal, and it is a part of a run's fingerprint.
    """

    @property
    def largest(self) -> TreeShape:
        """The largest shape that a tree can have, for which a target needs room."""

    def policy(self, grid: Grid, slots: int, on_gpu: bool) -> Policy:
        """Returns the policy that shapes the trees of `slots` images. on_gpu: choose sizes that fill the
        numbers of rows of recorded passes."""


class Policy(Protocol):
    """Chooses the shapes of a step's trees and learns from what was accepted. Images are named by slot."""

    @property
    def bounds(self) -> TreeShape:
        """A shape that no tree of the step exceeds. Fewer different ones mean fewer CUDA graphs."""

    def reset(self, slot: int, seed: int) -> None:
        """Starts a new image, with this seed, in the slot."""

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
        """Begins a step. Returns the shape of the tree of every image in flight. roots: position of each
        tree's root, which is the code that the image committed last."""

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Learns from the step. Images whose logits were not numbers are missing."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same shape at every cell: EAGLE-2, and EAGLE-1 with the shape of its static tree."""

    constant: TreeShape

    @property
    def bounds(self) -> TreeShape:
        return self.constant

    def reset(self, slot: int, seed: int) -> None: ...

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
        return dict.fromkeys(roots, self.constant)

    def observe(self, steps: Mapping[int, Step]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdaptiveTree:
    """Constants of the adaptive tree (ADT-Tree). The paper publishes none; these defaults were tuned on the
    embedded model (docs/LOG.md)."""

    beta: float = 0.5  # acceptance rate from which the tree becomes deeper and narrower
    step_depth: int = 1  # l_d: change of depth per step, in levels
    step_width: int = 1  # l_k: change of width per step, in nodes
    depth_min: int = 1
    depth_max: int = 8
    width_min: int = 1
    width_max: int = 4
    depth_start: int = 5
    width_start: int = 2
    budget: int = 10  # drafted nodes; the root is not counted
    init: str = "horizontal"  # one of INITS

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise UserError(f"tree.init {self.init!r}: choose one of {', '.join(INITS)}")
        counts = [item.name for item in fields(self) if item.name not in ("beta", "init")]
        store(self, {"beta": real("tree.beta", self.beta, most=1)})
        store(self, {name: integer(f"tree.{name}", getattr(self, name)) for name in counts})
        for name in ("depth", "width"):
            low, start, high = (getattr(self, f"{name}_{end}") for end in ("min", "start", "max"))
            if not 1 <= low <= start <= high:
                values = f"tree.{name}_min {low}, tree.{name}_start {start}, tree.{name}_max {high}"
                raise UserError(f"{values}: give numbers from 1 on, none smaller than the one before it")

    @property
    def largest(self) -> TreeShape:
        return TreeShape(self.depth_max, self.width_max, self.budget)

    def policy(self, grid: Grid, slots: int, on_gpu: bool) -> AdjacencyAdaptive:
        return AdjacencyAdaptive(self, slots, grid)


# Self-drafting: a tree of up to PURE_CHAIN nodes is a chain; MAIN_CHAIN bounds the main chain of a larger one
# (docs/LOG.md).
PURE_CHAIN, MAIN_CHAIN = 15, 24
CANDIDATES = 8  # self-drafting: candidates per position


def self_drafted(budget: int, width: int = CANDIDATES) -> TreeShape:
    """Returns the fixed shape of self-drafted trees with `budget` drafted nodes.

    The main chain has all nodes up to PURE_CHAIN. Beyond that it has three quarters of them, at least
    PURE_CHAIN and at most MAIN_CHAIN, or half of them if that is more: every pass refines the drafts along
    the chain for the next pass.
    """
    depth = max(min(budget, PURE_CHAIN), min(MAIN_CHAIN, -(-3 * budget // 4)), budget // 2)
    return TreeShape(depth, width, budget)


# ADT-Tree's constants for self-drafting, where depth is the length of the main chain. A level there costs one
# more row of the target's pass but no drafter pass, so deeper trees pay. Without depth_min, and with 0.4 to
# 0.8 of the codes accepted, the depth would come to rest at 4 to 15 levels with beta 0.2, and at 1.5 to 6
# with 0.5 (docs/METHOD.md, section 4). depth_min is 20 nevertheless, because every pass that scores a
# position refines its next draft (docs/LOG.md).
SELF_DRAFTED = AdaptiveTree(
    beta=0.2,
    step_depth=2,
    depth_min=20,
    depth_max=28,
    depth_start=24,
    width_min=4,
    width_max=8,
    width_start=6,
    budget=31,
)


@dataclass(slots=True)
class _Memory:
    """The policy's state for the current raster of one image."""

    random: random.Random
    raster: int = 0  # index of the raster
    # (depth, width) by (row, column) of the committed cells
    states: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    current: tuple[int, int] = (0, 0)  # (depth, width) of the tree that was asked for last
    rate: float | None = None  # acceptance rate of the last step that drafted anything


class AdjacencyAdaptive:
    """ADT-Tree (arXiv 2512.21857): depth and width follow the adjacent cell and the last acceptance rate.

    A tree starts from the (depth, width) of the adjacent cell. With alpha = accepted / depth of the previous
    tree, it becomes deeper and narrower if alpha >= beta, else shallower and wider, within the bounds. The
    first tree of an image has the start values. Every cell that a step commits stores the tree's (depth,
    width). Each further raster of the image starts anew, without the states and the rate of the one before.
    """

    def __init__(self, constants: AdaptiveTree, slots: int, grid: Grid) -> None:
        self.constants, self._grid = constants, grid
        self._memory = [_Memory(random.Random(0)) for _ in range(slots)]

    @property
    def bounds(self) -> TreeShape:
        return self.constants.largest

    def reset(self, slot: int, seed: int) -> None:
        """Forgets the slot's last image. The seed matters for init = random alone."""
        start = (self.constants.depth_start, self.constants.width_start)
        self._memory[slot] = _Memory(random.Random(seed), current=start)

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
        return {slot: self._shape(self._memory[slot], self._grid.cell(root)) for slot, root in roots.items()}

    def _shape(self, memory: _Memory, cell: Cell) -> TreeShape:
        """Returns the adjacent state, moved once by the last acceptance rate."""
        constants = self.constants
        if cell.raster != memory.raster:
            memory.raster, memory.rate = cell.raster, None
            memory.states.clear()
        depth, width = self._adjacent(memory, cell)
        if memory.rate is not None:
            sign = 1 if memory.rate >= constants.beta else -1
            depth = min(max(depth + sign * constants.step_depth, constants.depth_min), constants.depth_max)
            width = min(max(width - sign * constants.step_width, constants.width_min), constants.width_max)
        memory.current = (depth, width)
        return TreeShape(depth, width, constants.budget)

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Stores the state of each tree in the cells that the image committed. The last position of an
        image has no tree, and so no rate."""
        for slot, step in steps.items():
            memory = self._memory[slot]
            if step.depth:
                memory.rate = step.accepted / step.depth
            memory.states[step.row, step.column] = memory.current
            for position in range(step.position + 1, step.position + step.accepted + 1):
                cell = self._grid.cell(position)
                memory.states[cell.row, cell.column] = memory.current

    def _adjacent(self, memory: _Memory, cell: Cell) -> tuple[int, int]:
        row, column = cell.row, cell.column
        start = (self.constants.depth_start, self.constants.width_start)
        if self.constants.init == "random":
            return memory.random.choice(list(memory.states.values())) if memory.states else start
        above, left = memory.states.get((row - 1, column)), memory.states.get((row, column - 1))
        if self.constants.init == "both" and above and left:
            return (above[0] + left[0] + 1) // 2, (above[1] + left[1] + 1) // 2
        first, second = (above, left) if self.constants.init == "vertical" else (left, above)
        return first or second or start
