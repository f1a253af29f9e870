"""The images in flight, one per batch slot, and how a step changes them.

A finished image leaves its slot to the next request. After a step the host reads one small table from the
device: how many codes every image committed, which ones, and how probable the target's best codes were.
Everything else stays on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Buffer

from adt_tree.noise import PositionNoise
from adt_tree.noise_table import NoiseTable
from adt_tree.policy import ROOT_ONLY, Policy, TreeShape
from adt_tree.ranges import part
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request, StepStart, Target
from adt_tree.sampling import PassSampling
from adt_tree.settings import Sampling
from adt_tree.tree import BatchShapes, DraftTree
from adt_tree.verify import Verdict

END = object()  # follows the last request
Begin = Callable[[Mapping[int, tuple[Request, Sampling]]], Tensor]  # the first step of images, by slot


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outcome of one target call for the images in flight. The tensors are on the target's device."""

    images: list[tuple[int, Decoded]]  # (slot, image); images already hold the codes and step of this call
    finished: list[Decoded]  # the images that this call completed
    tree: DraftTree  # the draft trees; their roots are the codes committed last before this call
    verdict: Verdict  # the accepted path: nodes verdict.path[slot, : accepted + 1], the root first

    @property
    def committed(self) -> int:
        """Number of codes that this call committed to all images together."""
        return sum(image.steps[-1].accepted + 1 for _, image in self.images)


class BatchSlots:
    """The images in flight, with their state on the host and on the device, where it is updated in place, so
    that recorded functions read it. Only advance() reads the device, and refill() the first codes of images.
    """

    def __init__(
        self,
        target: Target,
        noise: NoiseTable,
        releases: Sequence[Callable[[int], None]],
        sampling: Sampling,
    ) -> None:
        """releases: the functions that empty the caches of a slot. sampling: the settings of requests that
        name none."""
        self.grid, self.noise = target.grid, noise
        self._padding, self._releases = target.padding, releases
        self._slots: list[Decoded | None] = [None] * target.slots
        self._requests: list[Request | None] = [None] * target.slots
        self._sampling = SlotSampling(sampling, target.slots, target.device)
        self._started = [0.0] * target.slots
        ends = target.grid.length > target.grid.size  # a grid without row ends needs no search for them
        self._row_ends = frozenset(filter(target.grid.is_row_end, range(target.grid.length)) if ends else ())
        self._cells = [0] * target.slots  # cells that each image has committed, row ends included
        zeros = partial(torch.zeros, dtype=torch.int64, device=target.device)
        self.last_codes = Buffer(zeros(target.slots))  # [B]
        # [B] of the first cell that each image has not committed. An idle slot begins at the last position of
        # the grid and moves on by one every step; nobody reads what it computes.
        self.positions = Buffer(zeros(target.slots))
        self._limits = Buffer(zeros(target.slots, 3))
        self._asked = list[TreeShape]()  # the shapes of the last step, and the least bounds of their trees
        self._shapes: BatchShapes  # the same on the device

    def open(self, requests: Iterable[Request | None]) -> None:
        """Begins a run. Empties all slots, because an earlier run may have left its images in them."""
        self._waiting, self._exhausted = iter(requests), False
        for slot in range(len(self._slots)):
            self._free(slot)

    def refill(self, begin: Begin) -> bool:
        """Frees the slots of clients who have gone, and gives every free slot the next request. Returns
        whether any image is in flight.

        The iterator of requests yields None while no request is waiting. It is asked again before the next
        step, or at once if no image is in flight; in that case it must block until a request arrives.

        begin: prefills slots, and returns the table of decode.first_codes().
        """
        for slot, request in enumerate(self._requests):
            if request and request.client and request.client.gone:
                self._free(slot)
        started = False
        while True:
            if asked := dict(self._ask()):
                self._begin(asked, begin)
                started = True
            if all(self._slots[slot] for slot in asked) and (self._exhausted or any(self._slots)):
                break
        for slot, image in enumerate(self._slots):
            # An idle slot commits one code a step. Its cache cannot overflow: it is emptied whenever an image
            # begins, and between two beginnings there are at most grid.length steps.
            if image is None and started:
                self._release(slot)
        self._clock = time.perf_counter()  # at the beginning of the step
        with part("noise"):
            self.noise.advance(self.committed)
        return any(self._slots)

    def _ask(self) -> Iterator[tuple[int, Request]]:
        """Yields free slots with the requests that are waiting."""
        for slot, image in enumerate(self._slots):
            if image is None and not self._exhausted:
                request = next(self._waiting, END)
                if request is None:
                    return
                if isinstance(request, Request):
                    yield slot, request
                else:
                    self._exhausted = True

    def _begin(self, asked: Mapping[int, Request], begin: Begin) -> None:
        """Starts images, except for those whose first logits are not numbers."""
        now, begun = time.perf_counter(), {}
        for slot, request in asked.items():
            sampling = request.sampling or self._sampling.common
            self._sampling.begin(slot, sampling)
            self.noise.begin(slot, request.seed, sampling.greedy)
            begun[slot] = request, sampling
        for (slot, request), (code, failed) in zip(asked.items(), begin(begun).tolist(), strict=True):
            if failed:
                self._fail(slot, request, nan_error(request.name, 0))
                continue
            self._started[slot] = now
            self.last_codes[slot], self.positions[slot], self._cells[slot] = code, 1, 1
            image = Decoded(request.name, request.seed, [code], warnings=list(request.warnings))
            self._slots[slot], self._requests[slot] = image, request

    def _fail(self, slot: int, request: Request | None, error: FloatingPointError) -> None:
        """Tells the client of an image, and frees its slot. Raises the error if there is no client."""
        if request is None or request.client is None:
            raise error
        request.client.fail(error)
        self._free(slot)

    def _free(self, slot: int) -> None:
        self._slots[slot] = self._requests[slot] = None
        self._cells[slot] = 0
        self._sampling.release(slot)
        self._release(slot)

    def _release(self, slot: int) -> None:
        """Empties all caches of a slot."""
        self.positions[slot] = self.grid.length - 1
        for release in self._releases:
            release(slot)

    @property
    def sampling(self) -> PassSampling:
        """The settings of the next pass."""
        return self._sampling.for_pass

    def active(self) -> list[tuple[int, Decoded]]:
        """Returns the occupied slots with their images."""
        return [(slot, image) for slot, image in enumerate(self._slots) if image is not None]

    @property
    def committed(self) -> list[int]:
        """Number of cells in each slot's prefix: all but the newest, which the target has not read yet; 0 for
        an idle slot."""
        return [max(cells - 1, 0) for cells in self._cells]

    def shapes(self, policy: Policy) -> list[TreeShape]:
        """Returns the policy's tree shape for each slot, cut so that no tree reaches past the end of its
        image. Idle slots have no room for a node."""
        shapes = [ROOT_ONLY] * len(self._slots)
        roots = {slot: self._cells[slot] - 1 for slot, _ in self.active()}
        for slot, shape in policy.shapes(roots).items():
            # The target itself chooses the code at the last position.
            shapes[slot] = shape.cut(self.grid.length - 2 - roots[slot])
        return shapes

    def step_start(self, shapes: list[TreeShape], policy: Policy) -> StepStart:
        """Returns what a proposer needs to know of a step with trees of these shapes."""
        asked = [*shapes, self._padding.tree(policy.bounds)]
        if asked != self._asked:  # most steps ask for the shapes of the step before
            bounds = BatchShapes.of(shapes, self._limits.device, asked[-1])
            self._asked, self._shapes = asked, replace(bounds, limits=self._limits.copy_(bounds.limits))
        longest = self._padding.longest(self.committed)
        return StepStart(
            self._shapes, self.last_codes, self.positions, self._noise_below, longest, self.sampling
        )

    def _noise_below(self, levels: int) -> PositionNoise:
        """Returns the noise of `levels` positions from the first that each image has not committed."""
        return self.noise.at(self.positions[:, None] + torch.arange(levels, device=self.positions.device))

    def commit(self, verdict: Verdict) -> None:
        """Moves the images on by a verdict, on the device."""
        self.last_codes.copy_(verdict.codes.gather(1, verdict.count[:, None] - 1)[:, 0])
        self.positions.add_(verdict.count)

    def advance(
        self, tree: DraftTree, verdict: Verdict, table: Tensor, shapes: Sequence[TreeShape]
    ) -> StepOutput:
        """Appends the codes that a step committed to their images, without row ends.

        table: of outcomes(). An image with NaN among the log-probabilities on its path leaves its slot;
        FloatingPointError if it has no client.
        """
        lines = table.tolist()  # the only line of a step at which the host waits for the device
        longest = verdict.path.shape[1]
        for slot, image in self.active():
            count, drafted = map(int, lines[slot][:2])
            codes, best = lines[slot][2 : 2 + count], lines[slot][2 + longest : 2 + longest + count]
            position = self._cells[slot]
            if self.record(slot, position, best, drafted, shapes[slot]):
                image.codes += [int(c) for n, c in enumerate(codes, position) if n not in self._row_ends]
        moved = self.active()  # before finished images leave their slots
        return StepOutput(moved, self.pop_finished(), tree, verdict)

    def record(self, slot: int, position: int, best: Sequence[float], drafted: int, shape: TreeShape) -> bool:
        """Adds a step to the image of a slot. Returns false if the image left the slot instead.

        position: of the first cell that the step committed. best: the largest probability at each committed
        cell. drafted: number of drafted nodes.
        """
        image = self._slots[slot]
        assert image is not None, "an idle slot has no steps"
        if any(map(math.isnan, best)):
            self._fail(slot, self._requests[slot], nan_error(image.name, position))
            return False
        cell = self.grid.cell(position)
        step = Step(
            position=position,
            row=cell.row,
            column=cell.column,
            depth=shape.depth,
            width=shape.width,
            nodes=drafted,
            accepted=len(best) - 1,
            ms=1e3 * (time.perf_counter() - self._clock),
            top1=[round(p, 4) for p in best],
            budget=shape.budget,
            raster=cell.raster if self.grid.before else None,
        )
        image.steps.append(step)
        image.target_calls += 1
        self._cells[slot] += len(best)
        return True

    def pop_finished(self) -> list[Decoded]:
        """Takes the finished images out of their slots and returns them. The slots are idle afterwards."""
        now, finished = time.perf_counter(), []
        for slot, image in self.active():
            if self._cells[slot] >= self.grid.length:
                image.seconds = now - self._started[slot]
                self._free(slot)
                finished.append(image)
        return finished


def outcomes(tree: DraftTree, top1: Tensor, verdict: Verdict) -> Tensor:
    """Returns the results of a step for the host, a table [B, 2 + 2 A] fp32, where A is the number of columns
    of verdict.codes.

    Row b is [number of codes committed, number of nodes drafted, A codes, A probabilities]; probability j is
    that of the most probable code at the position of code j. All share one tensor, so that one transfer is
    enough; fp32 represents integers up to 2^24, and so every code, exactly. top1 [B, N]: the log-probability
    of the most probable code after every node.
    """
    drafted = tree.valid.sum(dim=1, keepdim=True) - 1
    best = top1.gather(1, verdict.path).exp()
    return torch.cat((verdict.count[:, None], drafted, verdict.codes, best), dim=1)


def nan_error(name: str, position: int) -> FloatingPointError:
    """Returns the error for an image whose logits at a position are NaN or infinite."""
    return FloatingPointError(
        f"image {name}, position {position}: the model's logits are not numbers (NaN or infinite): "
        "damaged weights, or overflow in half precision (try precision bf16 or fp32)"
    )


class SlotSampling:
    """The settings of every slot, on the host and in a tensor that begin() updates in place. Temperature,
    guidance and top_p may differ from slot to slot."""

    def __init__(self, common: Sampling, slots: int, device: torch.device) -> None:
        """common: the engine's sampling, used for every image whose request names none."""
        self.common = common
        self._slots = [common] * slots
        self._rows = Buffer(torch.tensor([common.row] * slots, dtype=torch.float32, device=device))
        self.for_pass = PassSampling.of(self._rows, self._slots)  # the settings of the next pass

    def begin(self, slot: int, sampling: Sampling) -> None:
        """Gives a slot the settings of its next image.

        Raises ValueError if top_k or the order of filters differ from the engine's, or if the image needs
        guidance or noise and the engine has none.
        """
        common = self.common
        if (sampling.top_k, sampling.top_p_first) != (common.top_k, common.top_p_first):
            raise ValueError(f"{sampling}: top_k and top_p_first must be those of the engine, {common}")
        if sampling.branches > common.branches or common.greedy > sampling.greedy:
            raise ValueError(f"{sampling}: an engine for {common} has no guidance, or no noise")
        if sampling != self._slots[slot]:
            self._slots[slot] = sampling
            self._rows[slot] = torch.tensor(sampling.row, dtype=torch.float32, device="cpu")
            self.for_pass = PassSampling.of(self._rows, self._slots)

    def release(self, slot: int) -> None:
        """Resets an idle slot to the engine's sampling."""
        self.begin(slot, self.common)
