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
from adt_tree.roles import Prefix, Proposer, Request, Scored, Target
from adt_tree.sampling import Sampling, log_probs
from adt_tree.transfer import to_device
from adt_tree.tree import DraftTree, root_only_tree
from adt_tree.verify import Coupled, Rule, Verdict, accepted_nodes

IDLE = TreeShape(0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Settled:
    """What a cycle leaves beside what target and proposer keep."""

    roots: Tensor  # [B] the codes committed last
    outcome: Tensor  # [B, ...] int64: what the host has to know


@dataclass(slots=True)
class _Flight:
    """One image on its way."""

    image: Decoded
    started: float


class Slots:
    """The images in flight, known to the host; nothing here reads the device."""

    def __init__(self, target: Target, requests: Iterable[Request], release: Callable[[int], None]) -> None:
        """release empties a slot's caches, which idle from then on; whatever an earlier run left goes."""
        self.target, self.grid = target, target.grid
        self._waiting = iter(requests)
        self._flights: list[_Flight | None] = [None] * target.slots
        self.roots = torch.zeros(target.slots, dtype=torch.int64, device=target.device)
        self.seeds = torch.zeros_like(self.roots)  # [B]; of an idle slot those of its last image
        self._exhausted, self._release = False, release
        for slot in range(target.slots):
            release(slot)

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
    def committed(self) -> list[int]:
        """Image codes in each slot's prefix: all but the newest, which the target has not seen; 0 of idle
        slots."""
        return [0 if flight is None else len(flight.image.codes) - 1 for flight in self._flights]

    def land(self) -> Iterator[Decoded]:
        """Yield finished images and free their slots."""
        now = time.perf_counter()
        for slot, flight in enumerate(self._flights):
            if flight is not None and len(flight.image.codes) >= self.grid.size:
                flight.image.seconds = now - flight.started
                self._flights[slot] = None
                self._release(slot)
                yield flight.image


@torch.inference_mode()
def autoregressive(
    target: Target, requests: Iterable[Request], sampling: Sampling, noise: Noise
) -> Iterator[Decoded]:
    """Plain AR, one code an image and target call: y = argmax(log p + G). The reference every exact run
    must equal."""
    rule, slots = Coupled(noise), Slots(target, requests, target.release)
    drawn = noise.table(target.slots, target.grid.size, target.device)

    def begin(slot: int, request: Request) -> Tensor:
        drawn.begin(slot, request.seed)
        return _first(target, rule, sampling, slot, request)[0]

    while slots.refill(begin):
        clock = time.perf_counter()
        gumbel = drawn.at(slots.positions[:, None])
        scored = target.forward(root_only_tree(slots.roots), slots.committed)
        settled = target.passes.change(_settle_one, (target, sampling), scored, gumbel)
        slots.roots, outcome = settled.roots, settled.outcome.tolist()
        ms = 1e3 * (time.perf_counter() - clock)
        for slot, image in slots.flying():
            code, broken = outcome[slot]
            _refuse_nan(broken, image.name, len(image.codes))
            _record(image, slots, IDLE, 0, [code], ms)
        yield from slots.land()


def _settle_one(target: Target, sampling: Sampling, scored: Scored, gumbel: Tensor) -> _Settled:
    """Commit the root and choose the code after it: what Coupled does with a tree of one node."""
    log_p = log_probs(scored.logits, sampling)
    choice = (log_p + gumbel).argmax(dim=-1)
    root = torch.zeros_like(choice)
    target.commit(Verdict(root, root[:, 0] + 1, choice, tail=0), scored)
    return _Settled(choice[:, 0], torch.cat((choice, log_p[..., 0].isnan()), dim=1))


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

    def release(slot: int) -> None:
        target.release(slot)
        proposer.release(slot)

    slots = Slots(target, requests, release)
    drawn = rule.noise.table(target.slots, target.grid.size, target.device)

    def begin(slot: int, request: Request) -> Tensor:
        drawn.begin(slot, request.seed)
        code, prefix = _first(target, rule, sampling, slot, request)
        proposer.prefill(slot, request.prompt, prefix, code)
        policy.reset(slot, request.seed)
        return code

    while slots.refill(begin):
        clock = time.perf_counter()
        shapes = _shapes(policy, slots)
        positions, seeds, committed = slots.positions, slots.seeds, slots.committed
        tree = proposer.propose(shapes, slots.roots, partial(drawn.below, positions), committed)
        gumbel = drawn.at(positions[:, None] + tree.depths)
        scored = target.forward(tree, committed)
        roles = (target, proposer, rule, sampling)
        settled = proposer.passes.change(_settle, roles, tree, scored, gumbel, seeds, positions)
        slots.roots, outcome = settled.roots, settled.outcome.tolist()  # one transfer
        ms = 1e3 * (time.perf_counter() - clock)
        for slot, image in slots.flying():
            sick, count, nodes, *codes = outcome[slot]
            _refuse_nan(sick, image.name, len(image.codes))
            cells = _record(image, slots, shapes[slot], nodes, codes[:count], ms)
            image.drafter_calls += proposer.calls(shapes[slot])
            policy.observe(slot, count - 1, shapes[slot].depth, cells)
        yield from slots.land()


def _settle(
    target: Target,
    proposer: Proposer,
    rule: Rule,
    sampling: Sampling,
    tree: DraftTree,
    scored: Scored,
    gumbel: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> _Settled:
    """Judge the trees, commit the accepted paths and let the proposer learn from them. gumbel [B, N, V]: the
    noise of each node's position; seeds and positions [B], of the first code not yet committed."""
    log_p = log_probs(scored.logits, sampling)
    perturbed = log_p + gumbel
    verdict = rule(tree, log_p, perturbed, seeds, positions)
    target.commit(verdict, scored)
    proposer.observe(tree, log_p, perturbed, scored.features, verdict)
    roots = verdict.codes.gather(1, verdict.count[:, None] - 1)[:, 0]
    drafted = tree.valid.sum(dim=1) - 1
    broken = (accepted_nodes(tree, verdict) & log_p[..., 0].isnan()).any(dim=1)  # a row is NaN as a whole
    columns = (broken[:, None], verdict.count[:, None], drafted[:, None], verdict.codes)
    return _Settled(roots, torch.cat(columns, dim=1))


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
