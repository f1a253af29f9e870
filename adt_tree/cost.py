"""What passes cost on this device, measured, and which draft trees pay there.

A table holds milliseconds, for B images in flight that share every pass, of
  target   a pass over n nodes an image, the root included, with c codes committed, guidance and all
  drafter  a pass of the drafter network over w nodes an image, with c codes committed
  loop     all else in a cycle that self-drafts n - 1 nodes: noise, law, rule, proposer; n = 1: a plain step
Law: piecewise linear in n and w between measured sizes, constant below the first, the last slope above the
last; affine in c through the two contexts measured. B is not interpolated: a table is of one B.
Costs decide which tree is drafted, and never what a coupled rule draws.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adt_tree.decode import autoregressive, speculative
from adt_tree.grid import Grid
from adt_tree.jacobi import JacobiProposer
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, self_drafted
from adt_tree.records import Decoded
from adt_tree.roles import Drafter, Prefix, Request, Scored, Target
from adt_tree.sampling import Sampling
from adt_tree.stale import StaleCodes
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict

SIZES = (1, 2, 4, 8, 16, 24, 35, 65)  # nodes an image, root included
WIDTHS = (1, 2, 4, 8, 16, 24)  # nodes an image of a drafter pass
MOST_NODES = 560  # of all images together in a measured pass, but for the first size
ROUNDS = 9  # measurements a size, after one that warms up
ROWS = 4  # of the grid that the loop is timed on
COLD = 4  # cycles of it that are not counted


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds by size."""

    sizes: tuple[int, ...]  # ascending
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        """ValueError for what no measurement can be."""
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        sane = all(0 <= value < float("inf") for value in self.ms)
        if not (self.sizes and rising and sane and len(self.ms) == len(self.sizes)):
            raise ValueError(f"not a cost curve: sizes {self.sizes}, ms {self.ms}")

    def at(self, size: float) -> float:
        """Milliseconds by the law of the module."""
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.ms[0]
        right = min(bisect_right(self.sizes, size), len(self.sizes) - 1)
        step = self.ms[right] - self.ms[right - 1]
        slope = step / (self.sizes[right] - self.sizes[right - 1])
        return max(0.0, self.ms[right] + slope * (size - self.sizes[right]))


@dataclass(frozen=True, slots=True)
class Passes:
    """Milliseconds of passes by size and codes committed."""

    contexts: tuple[int, int]  # ascending
    curves: tuple[Curve, Curve]  # at either context

    def __post_init__(self) -> None:
        if not self.contexts[0] < self.contexts[1]:
            raise ValueError(f"not the contexts of a cost table: {self.contexts}")

    def at(self, size: float, context: float) -> float:
        """Milliseconds by the law of the module."""
        low, high = (curve.at(size) for curve in self.curves)
        share = (context - self.contexts[0]) / (self.contexts[1] - self.contexts[0])
        return max(0.0, low + share * (high - low))


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of cycles with `images` images in flight."""

    images: int
    target: Passes
    loop: Curve
    drafter: Passes | None  # None: no drafter network was at hand

    def cycle(self, nodes: int, context: float) -> float:
        """Milliseconds of a cycle that self-drafts `nodes` nodes; 0: of a plain step."""
        return self.target.at(1 + nodes, context) + self.loop.at(1 + nodes)

    def drafting(self, depth: int, width: int, calls: int, context: float) -> float:
        """Milliseconds of a tree's drafter passes: the first over the depth + 1 slots of a committed path,
        the others over `width` nodes. 0 without passes; ValueError if no drafter was measured."""
        if calls and self.drafter is None:
            raise ValueError("this cost table has no drafter passes")
        if not calls or self.drafter is None:
            return 0.0
        return self.drafter.at(depth + 1, context) + (calls - 1) * self.drafter.at(width, context)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, which from_dict reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> CostTable:
        """A stored table. ValueError if it is not one."""
        try:
            drafter = found["drafter"]
            return cls(
                int(found["images"]),
                _passes(found["target"]),
                _curve(found["loop"]),
                None if drafter is None else _passes(drafter),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a cost table: {type(error).__name__} {error}") from None


def _curve(found: Mapping[str, Any]) -> Curve:
    return Curve(tuple(found["sizes"]), tuple(found["ms"]))


def _passes(found: Mapping[str, Any]) -> Passes:
    (low, high), curves = found["contexts"], [_curve(curve) for curve in found["curves"]]
    return Passes((low, high), (curves[0], curves[1]))


@dataclass(frozen=True, slots=True)
class Offer:
    """A tree size and what is expected of it: tau codes an image in a cycle of ms milliseconds."""

    nodes: int  # drafted; 0: plain decoding
    tau: float
    ms: float

    @property
    def rate(self) -> float:
        """Codes an image and millisecond."""
        return self.tau / self.ms


def offers(table: CostTable, taus: Mapping[int, float], context: float) -> list[Offer]:
    """Every tree size whose tau is known, plain decoding (tau 1) first, with what its cycles cost."""
    known = {**taus, 0: 1.0}
    return [Offer(nodes, known[nodes], table.cycle(nodes, context)) for nodes in sorted(known)]


def best(choices: Iterable[Offer]) -> Offer:
    """The offer of the greatest rate; of equal ones the first."""
    return max(choices, key=lambda offer: offer.rate)


@torch.inference_mode()
def measure(
    target: Target,
    drafter: Drafter | None,
    prompt: Any,
    sampling: Sampling,
    tick: Callable[[], None],
) -> CostTable:
    """Time passes and the loop, with as many images in flight as the target has slots; they end up empty.

    Target and drafter need room for the largest of SIZES and of WIDTHS. tick is called
    ROUNDS + 2 times. All sizes take turns, so that a disturbance falls on all; each has its median.
    """
    for slot in range(target.slots):
        target.prefill(slot, prompt)
    # Both away from the ends of rows, which some targets spend a row of the pass on.
    contexts = (1, target.grid.size - target.grid.width)
    sizes = [size for size in SIZES if size == SIZES[0] or size * target.slots <= MOST_NODES]
    widest = target.forward(_star(target, max(sizes[-1], WIDTHS[-1])), [contexts[1]] * target.slots)
    stars = [_star(target, size) for size in sizes]
    jobs: list[Callable[[], object]] = [
        partial(target.forward, star, [context] * target.slots) for context in contexts for star in stars
    ]
    if drafter is not None:
        widths = [widest.features[:, :, :width] for width in WIDTHS]
        jobs += [partial(_expand, drafter, width, c) for c in contexts for width in widths]
    medians = _medians(jobs, target.device, tick)
    for slot in range(target.slots):
        target.release(slot)
    generator = torch.Generator(target.device).manual_seed(0)
    laws = torch.randn(widest.logits.shape, generator=generator, device=target.device)
    loop = [_loop_ms(_Blank(target, Scored(laws, widest.features)), size - 1, sampling) for size in sizes]
    tick()
    passed, drafted = medians[: 2 * len(sizes)], medians[2 * len(sizes) :]
    return CostTable(
        target.slots,
        _halves(contexts, sizes, passed),
        Curve(tuple(sizes), tuple(loop)),
        _halves(contexts, WIDTHS, drafted) if drafted else None,
    )


def _halves(contexts: tuple[int, int], sizes: Sequence[int], ms: Sequence[float]) -> Passes:
    """Milliseconds of all sizes at the first context, then at the second."""
    count = len(sizes)
    first, second = (Curve(tuple(sizes), tuple(ms[at : at + count])) for at in (0, count))
    return Passes(contexts, (first, second))


def _star(target: Target, nodes: int) -> DraftTree:
    """Trees of one level: a pass costs the same whatever the topology."""
    zero = torch.zeros(target.slots, nodes, dtype=torch.int64, device=target.device)
    depths = zero.clone()
    depths[:, 1:] = 1
    ancestors = torch.eye(nodes, dtype=torch.bool, device=target.device).repeat(target.slots, 1, 1)
    ancestors[:, :, 0] = True
    seen = torch.ones_like(zero, dtype=torch.bool)
    return DraftTree(zero, zero, depths, ancestors, seen, depth=min(1, nodes - 1), width=nodes - 1)


def _expand(drafter: Drafter, features: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """One level of the drafter below features [G, B, W, D]; it commits nothing."""
    _, images, width, _ = features.shape
    codes = torch.zeros(images, width, dtype=torch.int64, device=features.device)
    own = torch.eye(width, dtype=torch.bool, device=features.device).expand(images, -1, -1)
    return drafter.expand(codes, features, own, 0, context)


def _medians(
    jobs: Sequence[Callable[[], object]], device: torch.device, tick: Callable[[], None]
) -> list[float]:
    """Median milliseconds of each job over ROUNDS; the round before them warms up."""
    seconds: list[list[float]] = [[] for _ in jobs]
    for number in range(ROUNDS + 1):
        for job, own in zip(jobs, seconds, strict=True):
            _wait(device)
            started = time.perf_counter()
            job()
            _wait(device)
            if number:
                own.append(time.perf_counter() - started)
        tick()
    return [1e3 * statistics.median(own) for own in seconds]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Blank:
    """A target whose passes cost nothing, so that what a cycle takes is the loop's own."""

    def __init__(self, target: Target, scored: Scored) -> None:
        """scored: what every pass gives; its nodes bound the trees."""
        self.grid = Grid(ROWS, target.grid.width)
        self.num_codes, self.slots, self.device = target.num_codes, target.slots, target.device
        self.passes = target.passes
        self._scored = scored

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """See Target."""
        scored = self._scored
        return Prefix(scored.logits[:, slot, 0], [branch[slot, :1] for branch in scored.features])

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """See Target."""
        return Scored(self._scored.logits[:, :, : tree.nodes], self._scored.features[:, :, : tree.nodes])

    def commit(self, verdict: Verdict, scored: Scored) -> None:
        """See Target."""

    def release(self, slot: int) -> None:
        """See Target."""


def _loop_ms(blank: _Blank, nodes: int, sampling: Sampling) -> float:
    """Median milliseconds of the loop's own part of a cycle that self-drafts `nodes` nodes, 0: plain."""
    requests = [Request(str(slot), None, slot) for slot in range(blank.slots)]
    noise, made = Noise(blank.num_codes, silent=sampling.greedy), list[Decoded]()
    if nodes:
        shape = self_drafted(nodes)
        stale = StaleCodes(blank.grid, blank.slots, shape.width, "above", blank.num_codes, blank.device)
        proposer = JacobiProposer(stale, blank.passes)
        made += speculative(blank, proposer, Fixed(shape), Coupled(noise), iter(requests), sampling)
    else:
        made += autoregressive(blank, iter(requests), sampling, noise)
    longest = max(made, key=lambda image: len(image.steps)).steps
    return statistics.median(step.ms for step in longest[COLD:] or longest)
