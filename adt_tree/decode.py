"""The two loops: autoregressive(), the reference, and speculative(). Both keep B images in flight.

Each slot holds one image at its own position; a finished image leaves its slot to the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from adt_tree.noise import Noise
from adt_tree.policy import Cell, Policy, TreeShape
from adt_tree.records import Decoded, Step
from adt_tree.roles import Prefix, Proposer, Request, Target
from adt_tree.sampling import Sampling, log_probs
from adt_tree.transfer import to_device
from adt_tree.tree import lone_roots
from adt_tree.verify import Coupled, Rule, accepted_nodes

IDLE = TreeShape(0, 0, 0)


@dataclass(slots=True)
class _Flight:
    """One image on its way."""

    image: Decoded
    started: float


class Slots:
    """The images in flight, known to the host; nothing here reads the device."""

    def __init__(self, target: Target, requests: Iterable[Request]) -> None:
        self.target, self.grid = target, target.grid
        self._waiting = iter(requests)
        self._flights: list[_Flight | None] = [None] * target.slots
        self.roots = torch.zeros(target.slots, dtype=torch.int64, device=target.device)
        self.seeds = torch.zeros_like(self.roots)  # [B]; of an idle slot those of its last image
        self._exhausted = False

    def refill(self, begin: Callable[[int, Request], Tensor]) -> bool:
        """Give every free slot the next request; begin prefills and returns the first code. False: all is
        done."""
        for slot, flight in enumerate(self._flights):
            if flight is not None or self._exhausted:
                continue
            request = next(self._waiting, None)
            if request is None:
                self._exhausted = True
                break
            started = time.perf_counter()
            code = begin(slot, request)
            self.roots[slot], self.seeds[slot] = code, request.seed
            self._flights[slot] = _Flight(Decoded(request.name, request.seed, [int(code)]), started)
        return any(self._flights)

    def flying(self) -> Iterator[tuple[int, Decoded]]:
        """Occupied slots and their images."""
        return ((slot, flight.image) for slot, flight in enumerate(self._flights) if flight is not None)

    def remaining(self, slot: int) -> int:
        """Codes the slot's image still needs; 1 for an idle slot, which asks for nothing."""
        flight = self._flights[slot]
        return 1 if flight is None else self.grid.size - len(flight.image.codes)

    @property
    def positions(self) -> Tensor:
        """[B]: the position of the first code not yet committed."""
        done = [self.grid.size - self.remaining(slot) for slot in range(len(self._flights))]
        return to_device(done, self.target.device)

    @property
    def reach(self) -> int:
        """No slot has committed more image codes to the target's cache than this."""
        return max((len(image.codes) for _, image in self.flying()), default=1) - 1

    def land(self, release: Callable[[int], None]) -> Iterator[Decoded]:
        """Yield finished images and free their slots; release empties a slot's caches, which idle from now
        on."""
        now = time.perf_counter()
        for slot, flight in enumerate(self._flights):
            if flight is not None and len(flight.image.codes) >= self.grid.size:
                flight.image.seconds = now - flight.started
                self._flights[slot] = None
                release(slot)
                yield flight.image


@torch.inference_mode()
def autoregressive(
    target: Target, requests: Iterable[Request], sampling: Sampling, noise: Noise
) -> Iterator[Decoded]:
    """Plain AR, one code an image and target call: y = argmax(log p + G). The reference every exact run
    must equal."""
    rule, slots = Coupled(noise), Slots(target, requests)
    drawn = noise.table(target.slots, target.grid.size, target.device)

    def begin(slot: int, request: Request) -> Tensor:
        drawn.begin(slot, request.seed)
        return _first(target, rule, sampling, slot, request)[0]

    while slots.refill(begin):
        clock = time.perf_counter()
        tree = lone_roots(slots.roots)
        positions, seeds = slots.positions, slots.seeds
        logits, _ = target.forward(tree, slots.reach)
        log_p = log_probs(logits, sampling)
        verdict = rule(tree, log_p, log_p + drawn.at(positions[:, None]), seeds, positions)
        target.commit(verdict)
        slots.roots = verdict.codes[:, 0]
        outcome = torch.stack((slots.roots, log_p[:, 0, 0].isnan()), dim=1).tolist()
        ms = 1e3 * (time.perf_counter() - clock)
        for slot, image in slots.flying():
            code, broken = outcome[slot]
            _refuse_nan(broken, image.name, len(image.codes))
            _record(image, slots, IDLE, 0, [code], ms)
        yield from slots.land(target.release)


@torch.inference_mode()
def speculative(
    target: Target,
    proposer: Proposer,
    policy: Policy,
    rule: Rule,
    requests: Iterable[Request],
    sampling: Sampling,
) -> Iterator[Decoded]:
    """Draft a tree, score it in one target pass, accept a path, adapt the shape. Exact rules keep the
    target's law; coupled ones give the very codes of autoregressive() at the same seed."""
    slots = Slots(target, requests)
    drawn = rule.noise.table(target.slots, target.grid.size, target.device)

    def begin(slot: int, request: Request) -> Tensor:
        drawn.begin(slot, request.seed)
        code, prefix = _first(target, rule, sampling, slot, request)
        proposer.prefill(slot, request.prompt, prefix, code)
        policy.reset(slot, request.seed)
        return code

    def release(slot: int) -> None:
        target.release(slot)
        proposer.release(slot)

    while slots.refill(begin):
        clock = time.perf_counter()
        shapes = _shapes(policy, slots)
        positions, seeds, reach = slots.positions, slots.seeds, slots.reach
        tree = proposer.propose(shapes, slots.roots, partial(drawn.below, positions), reach)
        logits, features = target.forward(tree, reach)
        log_p = log_probs(logits, sampling)
        noisy = log_p + drawn.at(positions[:, None] + tree.depths)
        verdict = rule(tree, log_p, noisy, seeds, positions)
        target.commit(verdict)
        proposer.observe(tree, log_p, noisy, features, verdict)
        slots.roots = verdict.codes.gather(1, verdict.count[:, None] - 1)[:, 0]
        drafted = tree.valid.sum(dim=1) - 1
        broken = (accepted_nodes(tree, verdict) & log_p[..., 0].isnan()).any(dim=1)  # a row is NaN as a whole
        columns = (broken[:, None], verdict.count[:, None], drafted[:, None], verdict.codes)
        outcome = torch.cat(columns, dim=1).tolist()  # one transfer
        ms = 1e3 * (time.perf_counter() - clock)
        for slot, image in slots.flying():
            sick, count, nodes, *codes = outcome[slot]
            _refuse_nan(sick, image.name, len(image.codes))
            cells = _record(image, slots, shapes[slot], nodes, codes[:count], ms)
            image.drafter_calls += proposer.calls(shapes[slot])
            policy.observe(slot, count - 1, shapes[slot].depth, cells)
        yield from slots.land(release)


def _first(
    target: Target, rule: Rule, sampling: Sampling, slot: int, request: Request
) -> tuple[Tensor, Prefix]:
    """Prefill a slot and draw the image's first code."""
    prefix = target.prefill(slot, request.prompt)
    zero = torch.zeros(1, dtype=torch.int64, device=target.device)
    log_p = log_probs(prefix.logits[:, None], sampling)
    _refuse_nan(bool(log_p[0, 0].isnan()), request.name, 0)
    code = rule.choose(log_p, zero + request.seed, zero)
    return code[0], prefix


def _refuse_nan(broken: bool, name: str, position: int) -> None:
    """FloatingPointError if the target's law of an image is not one."""
    if broken:
        raise FloatingPointError(
            f"image {name}, position {position}: the model's logits are not numbers (NaN or infinite): "
            "damaged weights, or overflow in half precision (try --precision bf16 or fp32)"
        )


def _shapes(policy: Policy, slots: Slots) -> list[TreeShape]:
    """The policy's shape for each image, cut to what remains of it; idle slots draft nothing."""
    shapes = [IDLE] * slots.target.slots
    for slot, image in slots.flying():
        shape = policy.shape(slot, slots.grid.cell(len(image.codes) - 1))
        shapes[slot] = shape.cut(slots.remaining(slot) - 1)
    return shapes


def _record(
    image: Decoded, slots: Slots, shape: TreeShape, nodes: int, codes: list[int], ms: float
) -> list[Cell]:
    """Append a cycle's codes and its Step; returns the cells committed."""
    position = len(image.codes)
    row, column = slots.grid.cell(position)
    image.codes.extend(codes)
    image.steps.append(Step(position, row, column, shape.depth, shape.width, nodes, len(codes) - 1, ms))
    image.target_calls += 1
    return [slots.grid.cell(p) for p in range(position, position + len(codes))]
