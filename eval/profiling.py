"""Where the time of a decode goes: stopwatches around the roles, none inside the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.noise import Noise, NoiseTable
from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, NoiseBelow, Prefix, Proposer, Request, Scored, Target
from adt_tree.tree import BatchShapes, DraftTree
from adt_tree.verify import Rule, Verdict
from eval.arms import Arm, network
from eval.session import synchronise

PARTS = ("target", "drafter", "tree", "verify", "host")


class Stopwatch:
    """Seconds by part; time inside a nested part counts for that part only."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device, self._stack, self._mark = device, ["host"], time.perf_counter()

    def restart(self) -> None:
        """Forget everything up to now."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._turn()

    def _turn(self) -> None:
        synchronise(self._device)
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute what happens inside to `name`."""
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def shares(self) -> dict[str, float]:
        """Fractions of the time since the restart."""
        self._turn()
        total = sum(self.seconds.values())
        return {name: round(value / total, 4) for name, value in self.seconds.items()}


class TimedTarget:
    """A target under the stopwatch."""

    def __init__(self, inner: Target, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch
        self.grid, self.num_codes, self.slots, self.device = (
            inner.grid,
            inner.num_codes,
            inner.slots,
            inner.device,
        )

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """See Target."""
        with self._watch.part("target"):
            return self.inner.prefill(slot, prompt)

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """See Target."""
        with self._watch.part("target"):
            return self.inner.forward(tree, committed)

    def commit(self, tree: DraftTree, verdict: Verdict) -> None:
        """See Target."""
        with self._watch.part("target"):
            self.inner.commit(tree, verdict)

    def release(self, slot: int) -> None:
        """See Target."""
        self.inner.release(slot)


class TimedDrafter:
    """A drafter under the stopwatch."""

    def __init__(self, inner: Drafter, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch
        self.device = inner.device

    def prefill(self, slot: int, prompt: Any, prefix: Prefix) -> None:
        """See Drafter."""
        with self._watch.part("drafter"):
            self.inner.prefill(slot, prompt, prefix)

    def release(self, slot: int) -> None:
        """See Drafter."""
        self.inner.release(slot)

    def extend(
        self, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """See Drafter."""
        with self._watch.part("drafter"):
            return self.inner.extend(features, codes, count, committed)

    def expand(
        self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """See Drafter."""
        with self._watch.part("drafter"):
            return self.inner.expand(codes, features, ancestors, depth)


class TimedProposer:
    """A proposer under the stopwatch: what is not its drafter's is the tree's."""

    def __init__(self, inner: Proposer, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch

    def calls(self, shape: TreeShape) -> int:
        """See Proposer."""
        return self.inner.calls(shape)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        with self._watch.part("tree"):
            self.inner.prefill(slot, prompt, prefix, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        self.inner.release(slot)

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        with self._watch.part("tree"):
            return self.inner.propose(shapes, last_codes, noise_below, committed)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """See Proposer."""
        with self._watch.part("tree"):
            self.inner.observe(tree, perturbed, features, verdict)


class TimedNoise:
    """Noise whose table is under the stopwatch."""

    def __init__(self, inner: Noise, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch

    def table(self, slots: int, positions: int, device: torch.device) -> TimedTable:
        """See Noise."""
        return TimedTable(self.inner.table(slots, positions, device), self._watch)


class TimedTable:
    """A table of noise under the stopwatch."""

    def __init__(self, inner: NoiseTable, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch

    def begin(self, slot: int, seed: int) -> None:
        """See NoiseTable."""
        with self._watch.part("verify"):
            self.inner.begin(slot, seed)

    def at(self, positions: Tensor) -> Tensor:
        """See NoiseTable."""
        with self._watch.part("verify"):
            return self.inner.at(positions)

    def below(self, positions: Tensor, levels: int) -> Tensor:
        """See NoiseTable."""
        with self._watch.part("verify"):
            return self.inner.below(positions, levels)


class TimedRule:
    """A rule under the stopwatch, the drawing of its noise included."""

    def __init__(self, inner: Rule, watch: Stopwatch) -> None:
        self.inner, self._watch = inner, watch
        self.noise = TimedNoise(inner.noise, watch)

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See Rule."""
        with self._watch.part("verify"):
            return self.inner.choose(log_p, seeds, positions)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """See Rule."""
        with self._watch.part("verify"):
            return self.inner(tree, log_p, perturbed, seeds, positions)


def profile(arm: Arm, requests: Sequence[Request]) -> dict[str, float]:
    """Fractions of the time an arm spends in target, drafter, tree, verify and host.

    host: the loop, the sampling law and, in plain decoding, its rule. The stopwatches cost some microseconds.
    """
    watch = Stopwatch(arm.target.device)
    clocked = replace(arm, target=TimedTarget(arm.target, watch))
    eagle = network(arm.proposer)
    if arm.proposer is not None:
        clocked = replace(
            clocked, proposer=TimedProposer(arm.proposer, watch), rule=TimedRule(arm.rule, watch)
        )
    if eagle is not None:
        drafter, eagle.drafter = eagle.drafter, TimedDrafter(eagle.drafter, watch)
    watch.restart()
    try:
        for _ in clocked.decode(iter(requests)):
            pass
        return watch.shares()
    finally:
        if eagle is not None:
            eagle.drafter = drafter
