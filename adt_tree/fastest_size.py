"""The size of self-drafted trees, chosen by what their steps cost here.

A larger tree commits more codes per step and makes it longer. How much longer is measured: the first steps
try every size in turn. A wrong choice costs time but no codes: images do not depend on their trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape, self_drafted
from adt_tree.records import Step

# Drafted nodes to choose from. On a GPU passes have 8, 16 or 32 rows, and smaller trees would gain no time.
CPU_SIZES, GPU_SIZES = (3, 7, 15, 19, 31), (7, 15, 31)
# A self-drafted tree of n nodes accepts about 0.5 * n ** 0.7 codes, as the embedded model did at 7 to 31
# nodes (docs/LOG.md). The factor is only where a run starts from.
FACTOR, EXPONENT = 0.5, 0.7
TIMED_STEPS = 4  # of each size. A loaded machine only adds time, so the shortest of them counts.
MEMORY = 1000.0  # a forgets old steps over about MEMORY / gain(n) of them


@dataclass(frozen=True, slots=True)
class AutoTree:
    """Trees whose size is chosen while decoding: a value of Method.tree."""

    def __str__(self) -> str:
        """Returns the name of these trees in the fingerprint of a run."""
        return "auto"

    @property
    def largest(self) -> TreeShape:
        return self_drafted(CPU_SIZES[-1])

    def shapes(self, grid: Grid, on_gpu: bool) -> list[TreeShape]:
        """Returns the shapes to choose from, smallest first. Deeper trees than an image has room for after
        its first step are left out: all steps with them would be cut, and none timed."""
        shapes = [self_drafted(nodes) for nodes in (GPU_SIZES if on_gpu else CPU_SIZES)]
        return [shape for shape in shapes if shape.depth <= grid.length - 3] or [self_drafted(1)]

    def policy(self, grid: Grid, slots: int, on_gpu: bool) -> FastestSize:
        return FastestSize(self.shapes(grid, on_gpu), grid.width, on_gpu)


class FastestSize:
    """The policy that takes the size n which commits most codes per second: argmax (1 + a * gain(n)) / ms(n).

    ms(n) is the shortest of TIMED_STEPS steps, timed in the first steps at each number of images in flight.
    The sizes take turns, so that a slow moment meets all of them. A size's first step, which may allocate
    memory or record graphs, is hardly the shortest. gain(n) is the growth law, a the accepted codes per unit
    of gain so far. A size is chosen when all are timed, and again when an image begins or the number of
    images in flight changes.
    """

    def __init__(self, shapes: Sequence[TreeShape], row_width: int, on_gpu: bool) -> None:
        """row_width: W, the cells of a row; nodes beyond the cell below the root gain half as much. on_gpu:
        idle slots take part in passes, so that the number of images in flight changes no time."""
        self._shapes, self._on_gpu = shapes, on_gpu
        self._gain = [gain(shape.budget, row_width) for shape in shapes]
        self._times: dict[int, list[list[float]]] = {}  # by images in flight: ms of the steps of each size
        self._ratio = FACTOR
        self._size, self._images = 0, 0  # index of the present shape, and images in flight
        self._is_settled = False  # no choice is due

    @property
    def bounds(self) -> TreeShape:
        return self._shapes[self._size]

    def reset(self, slot: int, seed: int) -> None:
        self._is_settled = False

    def shapes(self, roots: Mapping[int, int]) -> Mapping[int, TreeShape]:
        images = 1 if self._on_gpu else len(roots)
        times = self._times.setdefault(images, [[] for _ in self._shapes])
        next_timed = min(range(len(times)), key=lambda size: len(times[size]))
        if len(times[next_timed]) < TIMED_STEPS:
            self._size, self._is_settled = next_timed, False
        elif not self._is_settled or images != self._images:
            speeds = [(1 + self._ratio * g) / min(ms) for g, ms in zip(self._gain, times, strict=True)]
            self._size, self._is_settled = speeds.index(max(speeds)), True
        self._images = images
        return dict.fromkeys(roots, self._shapes[self._size])

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Steps whose trees were cut at the end of their images are left out."""
        whole = [step for step in steps.values() if step.depth == self._shapes[self._size].depth]
        for step in whole:
            self._ratio += (step.accepted - self._ratio * self._gain[self._size]) / MEMORY
        times = self._times[self._images][self._size]
        if whole and len(times) < TIMED_STEPS:
            times.append(whole[0].ms)


def gain(nodes: int, row_width: int) -> float:
    """Returns the codes, up to a factor, that a self-drafted tree of so many nodes accepts."""
    return (min(nodes, row_width) + max(nodes - row_width, 0) / 2) ** EXPONENT
