"""The loop that continues several rows of every image in each pass of the target.

A step is that of adt_tree.decode.speculative(), for every head: shape, draft, score, verify, commit, observe.
All heads of all images share the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from adt_tree.batch import BatchSlots, StepOutput, outcomes
from adt_tree.decode import first_codes
from adt_tree.policy import ROOT_ONLY, TreeShape
from adt_tree.ranges import part
from adt_tree.roles import Proposer, Request, Scored, StepStart, Target
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import BatchShapes, DraftTree, root_only_tree
from adt_tree.verify import Rule, Verdict
from lab.rows.nodes import PassNodes, Plan, numbers_of
from lab.rows.schedule import Head, Schedule


class RowTarget(Target, Protocol):
    """A target whose cache can be addressed by position."""

    def score(self, codes: Tensor, depths: Tensor, ancestors: Tensor, committed: tuple[int, ...]) -> Scored:
        """Scores nodes with codes and positions (depths) [B, N]. They attend to the prompt and, by ancestors
        [B, N, P + N], to the P entries behind it and to one another; their own entries follow these."""

    def move(self, source: Tensor, place: Tensor) -> None:
        """Copies entry source [B, E] behind the prompt to entry place [B, E] behind it."""


class RowProposer(Proposer, Protocol):
    """A proposer with a slot for every head. A slot drafts cells of one row after the other."""

    def begin(self, slot: int, position: int) -> None:
        """Forgets the slot's drafts. Its next cell is that at `position`."""

    def know(self, codes: Tensor) -> None:
        """Takes over the committed codes [slots, P + 1] of the images, from which cells may be copied."""


@torch.inference_mode()
def several_rows(
    target: RowTarget, images: RowImages, rule: Rule, slots: BatchSlots, requests: Iterable[Request | None]
) -> Iterator[StepOutput]:
    """Yields the outcome of every target call.

    The codes are not distributed as the target's, unless every row begins when the row above is finished. An
    image holds its codes, in raster order, once it is finished.
    """

    def begin(begun: Mapping[int, tuple[Request, Sampling]]) -> Tensor:
        table, _ = first_codes(target, rule, begun)
        for slot, code in zip(begun, table[:, 0], strict=True):
            images.begin(slot, code)
        return table

    slots.open(requests)
    while slots.refill(begin):
        with part("tree"):
            step = images.next_step([slot for slot, _ in slots.active()])
            plan, tree = images.draft(step, slots.sampling)
        with part("target"):
            inputs = (slots.sampling, plan, tree, step.size)
            perturbed, features, verdict, table = target.run(score_rows, target, rule, slots, images, *inputs)
        if images.proposer is not None:
            with part("tree"):
                images.proposer.observe(tree, perturbed, features, verdict, plan.first)
        yield images.advance(slots, step, tree, verdict, table)


def score_rows(
    target: RowTarget,
    rule: Rule,
    slots: BatchSlots,
    images: RowImages,
    sampling: PassSampling,
    plan: Plan,
    tree: DraftTree,
    size: int,
) -> tuple[Tensor, Tensor, Verdict, Tensor]:
    """Does for the trees of all heads what adt_tree.decode.score_and_judge() does for one tree per image.
    size: nodes of the pass."""
    nodes = PassNodes.of(plan, tree, images.cached[:, :-1], size)
    scored = target.score(nodes.codes, nodes.positions, nodes.visible, (0,) * target.slots)
    with part("verify"):
        noise = slots.noise.at(nodes.positions + 1)
        log_p = log_probs(scored.logits, sampling, noise.forced)
        log_p, perturbed = (nodes.by_head(x, tree.nodes) for x in (log_p, log_p + noise.gumbel))
        seeds = slots.noise.seeds.repeat_interleave(plan.position.shape[1])
        verdict = rule(tree, log_p, perturbed, seeds, plan.first)
        table = outcomes(tree, log_p.amax(dim=-1), verdict)
    with part("commit"):
        entries, positions = nodes.moves(plan, verdict, target.grid.length)
        target.move(entries, positions)
        images.commit(plan, verdict, positions)
    return perturbed, scored.features, verdict, table


@dataclass(frozen=True, slots=True)
class RowStep:
    """What is known of a step before its drafts."""

    heads: list[list[Head | None]]  # [B][A]
    shapes: list[list[TreeShape]]  # [B][A], of their trees
    numbers: Tensor  # of its plan
    size: int  # nodes of the pass


class RowImages:
    """The rows of the images in flight: codes [B, P + 1] and cells in the cache [B, P + 1] on the device, and
    the progress of every image on the host. The extra column receives what belongs to no cell."""

    def __init__(
        self, target: RowTarget, schedule: Schedule, largest: TreeShape, proposer: RowProposer | None
    ) -> None:
        """largest: the largest tree of a head. proposer: None for no drafts. Head a of the image in slot b is
        slot b * schedule.heads + a of the proposer and the rule."""
        self._target, self._schedule, self._largest, self.proposer = target, schedule, largest, proposer
        self._progress = [schedule.begin(0) for _ in range(target.slots)]
        shape, device = (target.slots, target.grid.length + 1), target.device
        self.codes = torch.zeros(shape, dtype=torch.int64, device=device)
        self.cached = torch.zeros(shape, dtype=torch.bool, device=device)

    def begin(self, slot: int, code: Tensor) -> None:
        """Starts an image with its first code []."""
        self._progress[slot] = self._schedule.begin(int(code))
        self.codes[slot] = self.cached[slot] = 0
        self.codes[slot, 0] = code

    def next_step(self, active: list[int]) -> RowStep:
        """Returns the next pass over the images in the slots `active`."""
        heads: list[list[Head | None]] = [
            self._schedule.next_heads(progress) if slot in active else [None] * self._schedule.heads
            for slot, progress in enumerate(self._progress)
        ]
        shapes = [[self._shape(head) for head in of_image] for of_image in heads]
        nodes = [
            [num_nodes(shape) if head else 0 for head, shape in zip(*pair, strict=True)]
            for pair in zip(heads, shapes, strict=True)
        ]
        most = max(map(sum, nodes))
        if self._target.padding.few:
            most = self._target.padding.nodes(self._schedule.heads * num_nodes(self._largest))
        return RowStep(heads, shapes, numbers_of(heads, nodes, self._target.device), most)

    def _shape(self, head: Head | None) -> TreeShape:
        """Returns the shape of a head's tree. The target itself chooses the last code that a row commits."""
        return self._largest.cut(head.room - 1) if head and head.room else ROOT_ONLY

    def draft(self, step: RowStep, sampling: PassSampling) -> tuple[Plan, DraftTree]:
        """Returns the plan of a pass, and the trees of all heads, [B * A, M]."""
        plan, roots, tree = self._target.run(self._plan, step.numbers)
        if self.proposer is None:
            return plan, tree
        for slot, head in enumerate(chain.from_iterable(step.heads)):
            if head and head.begins:
                self.proposer.begin(slot, head.position + 1)
        bounds = self._target.padding.tree(self._largest)
        shapes = BatchShapes.of([*chain.from_iterable(step.shapes)], self._target.device, bounds)
        start = StepStart(shapes, roots, plan.first, _no_noise, self._target.grid.length, sampling)
        return plan, self.proposer.propose(start)

    def _plan(self, numbers: Tensor) -> tuple[Plan, Tensor, DraftTree]:
        """Returns the plan of these numbers, the roots [B * A], and trees that consist of them. Tells the
        proposer the committed codes."""
        plan = Plan.of(numbers)
        if self.proposer is not None:
            self.proposer.know(self.codes.repeat_interleave(self._schedule.heads, dim=0))
        roots = self.codes.gather(1, plan.source).flatten()
        return plan, roots, root_only_tree(roots)

    def commit(self, plan: Plan, verdict: Verdict, positions: Tensor) -> None:
        """Stores the codes that the heads commit. positions [B, A * L]: of the cells that are in the cache
        now."""
        self.cached.scatter_(1, positions, True)
        images, heads = plan.position.shape
        codes, count = (x.view(images, heads, -1) for x in (verdict.codes, verdict.count))
        level = torch.arange(codes.shape[2], device=codes.device)
        at = plan.position[..., None] + 1 + level
        at = at.masked_fill((level >= count) | ~plan.open[..., None], self._target.grid.length)
        self.codes.scatter_(1, at.flatten(1), codes.flatten(1))

    def advance(
        self, slots: BatchSlots, step: RowStep, tree: DraftTree, verdict: Verdict, table: Tensor
    ) -> StepOutput:
        """Adds the codes that a step committed to their images. table: of outcomes()."""
        of_heads, longest = table.tolist(), verdict.path.shape[1]  # here the host waits for the device
        for slot, image in slots.active():
            first, of_image = slot * self._schedule.heads, step.heads[slot]
            open_ = [(number, head) for number, head in enumerate(of_image) if head and head.room]
            lines = [of_heads[first + number] for number, _ in open_]
            codes = [[int(code) for code in line[2:][: int(line[0])]] for line in lines]
            best = [p for line in lines for p in line[2 + longest :][: int(line[0])]]
            position = 1 + min(head.position for _, head in open_)
            shapes = [step.shapes[slot][number] for number, _ in open_]
            depth, budget = max(shape.levels for shape in shapes), sum(shape.budget for shape in shapes)
            shape = replace(self._largest, depth=depth, budget=budget)
            drafted = sum(int(line[1]) for line in lines)
            if slots.record(slot, position, best, drafted, shape):
                self._schedule.advance(self._progress[slot], [head for _, head in open_], codes)
                image.codes[:] = self._schedule.image(self._progress[slot]) or image.codes
        moved = slots.active()
        return StepOutput(moved, slots.pop_finished(), tree, verdict)


def num_nodes(shape: TreeShape) -> int:
    """Returns the largest number of nodes of a tree of this shape, the root included."""
    return 1 + min(shape.budget, shape.depth * shape.width)


def _no_noise(levels: int) -> NoReturn:
    raise NotImplementedError("drafter networks, which read noise, do not draft several rows")
