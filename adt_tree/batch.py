"""The images in flight, one per batch slot, and what one step does to them.

A finished image leaves its slot to the next request. The host learns of a step by one transfer: how many
codes every image committed, which, and how sure the target was. Everything else stays on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.grid import Cell
from adt_tree.policy import Policy, TreeShape
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request, Target
from adt_tree.tree import IDLE, BatchShapes, DraftTree, to_device
from adt_tree.verify import Verdict


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One target call and what it did to every image in flight. Tensors are the loop's, on its device."""

    images: list[tuple[int, Decoded]]  # (slot, image): codes and steps of this call are already in the image
    finished: list[Decoded]  # those of them that are complete
    tree: DraftTree  # what was drafted below the code committed before
    verdict: Verdict  # the path that was accepted: nodes verdict.path[slot, : accepted + 1], root included


class BatchSlots:
    """The images in flight as the host knows them. Only advance() reads the device."""

    def __init__(self, target: Target, requests: Iterable[Request], release: Callable[[int], None]) -> None:
        """release empties the caches of a slot; all are emptied now, whatever an earlier run left."""
        self.grid, self.device = target.grid, target.device
        self._run, self._few_shapes = target.run, target.few_shapes
        self._waiting = iter(requests)
        self._slots: list[Decoded | None] = [None] * target.slots
        self._started = [0.0] * target.slots
        self._exhausted, self._release = False, release
        self.last_codes = torch.zeros(target.slots, dtype=torch.int64, device=target.device)  # [B]
        self.seeds = torch.zeros_like(self.last_codes)  # [B]; of an idle slot that of its last image
        for slot in range(target.slots):
            release(slot)

    def refill(self, begin: Callable[[int, Request], Tensor]) -> bool:
        """Give every free slot the next request; begin prefills and returns the first code. False: all is
        done."""
        for slot, image in enumerate(self._slots):
            if image is not None or self._exhausted:
                continue
            request = next(self._waiting, None)
            if request is None:
                self._exhausted = True
                break
            self._started[slot] = time.perf_counter()
            code = begin(slot, request)
            self.last_codes[slot], self.seeds[slot] = code, request.seed
            self._slots[slot] = Decoded(request.name, request.seed, [int(code)])
        return any(self._slots)

    def active(self) -> list[tuple[int, Decoded]]:
        """Occupied slots and their images."""
        return [(slot, image) for slot, image in enumerate(self._slots) if image is not None]

    @property
    def positions(self) -> Tensor:
        """[B]: the position of the first code not yet committed; of idle slots the image's last."""
        last = self.grid.size - 1
        done = [last if image is None else len(image.codes) for image in self._slots]
        return to_device(done, self.device)

    @property
    def committed(self) -> list[int]:
        """Image codes in each slot's prefix: all but the newest, which the target has not seen; 0 of idle
        slots."""
        return [0 if image is None else len(image.codes) - 1 for image in self._slots]

    def shapes(self, policy: Policy) -> list[TreeShape]:
        """The policy's shape for each image, cut to what remains of it; idle slots draft nothing."""
        shapes = [IDLE] * len(self._slots)
        for slot, image in self.active():
            shape = policy.shape(slot, self.grid.cell(len(image.codes) - 1))
            shapes[slot] = shape.cut(self.grid.size - len(image.codes) - 1)
        return shapes

    def bounds(self, shapes: Sequence[TreeShape], policy: Policy) -> BatchShapes:
        """The shapes of one step with their bounds, which are the policy's if few shapes are faster."""
        return BatchShapes.of(shapes, self.device, policy.bounds if self._few_shapes else IDLE)

    def advance(
        self, tree: DraftTree, top1: Tensor, verdict: Verdict, shapes: Sequence[TreeShape], started: float
    ) -> StepOutput:
        """Append what a step committed to its images. top1 [B, N]: log-probability of the most probable code
        after every node. FloatingPointError if one on the path is not a number.

        Here the host waits for the device, once, for the table of outcomes().
        """
        self.last_codes, outcome = self._run(outcomes, tree.valid, top1, verdict)
        table = outcome.tolist()
        ms, longest = 1e3 * (time.perf_counter() - started), verdict.path.shape[1]
        images = self.active()
        for slot, image in images:
            count, nodes = map(int, table[slot][:2])
            codes, sure = table[slot][2 : 2 + count], table[slot][2 + longest : 2 + longest + count]
            position, size = len(image.codes), (shapes[slot].depth, shapes[slot].width)
            refuse_nan(any(map(math.isnan, sure)), image.name, position)
            image.codes += map(int, codes)
            cell, sure = self.grid.cell(position), [round(p, 4) for p in sure]
            raster = cell.raster if self.grid.before else None
            step = Step(position, cell.row, cell.column, *size, nodes, count - 1, ms, sure, raster)
            image.steps.append(step)
            image.target_calls += 1
        return StepOutput(images, self.pop_finished(), tree, verdict)

    def cells(self, step: Step) -> list[Cell]:
        """The cells that a step committed."""
        return [self.grid.cell(step.position + place) for place in range(step.accepted + 1)]

    def pop_finished(self) -> list[Decoded]:
        """Take finished images out of their slots, which idle from now on."""
        now, finished = time.perf_counter(), []
        for slot, image in self.active():
            if len(image.codes) >= self.grid.size:
                image.seconds = now - self._started[slot]
                self._slots[slot] = None
                self._release(slot)
                finished.append(image)
        return finished


def outcomes(valid: Tensor, top1: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Returns the last committed codes [B], and a table [B, 2 + 2 A] of what the host needs to know: codes
    committed, nodes drafted, the codes, and the probability of the most probable code at their positions.

    The table is fp32, which holds integers up to 2^24. valid, top1 [B, N].
    """
    last = verdict.codes.gather(1, verdict.count[:, None] - 1)[:, 0]
    drafted = valid.sum(dim=1, keepdim=True) - 1
    sure = top1.gather(1, verdict.path).exp()
    return last, torch.cat((verdict.count[:, None], drafted, verdict.codes, sure), dim=1)


def refuse_nan(has_nan: bool, name: str, position: int) -> None:
    """FloatingPointError if the target's distribution at a position is not one."""
    if has_nan:
        raise FloatingPointError(
            f"image {name}, position {position}: the model's logits are not numbers (NaN or infinite): "
            "damaged weights, or overflow in half precision (try --precision bf16 or fp32)"
        )
