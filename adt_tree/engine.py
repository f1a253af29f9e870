"""Puts a method on a model: makes its target, proposer, tree policy and verification rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from threading import Lock
from typing import cast

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.errors import UserError
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.policy import ROOT_ONLY, Policy
from adt_tree.records import Decoded
from adt_tree.roles import MethodOnModel, Model, Proposer, Request, Target
from adt_tree.sampling import Sampling
from adt_tree.verify import Rule
from lab.rows.decode import several_rows
from lab.rows.heads import Heads, RowTarget, make_heads
from lab.rows.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that one method needs on one model. It makes the images of one run at a time."""

    method: Method
    sampling: Sampling
    target: Target
    drafting: tuple[Proposer, Policy, Rule] | None = None  # None: the AR baseline, or several rows at once
    heads: Heads | None = None  # None: one row after the other
    _decoding: Lock = field(default_factory=Lock, compare=False, repr=False)  # held while steps are taken

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes of a pass over one image."""
        nodes = self.method.tree.largest.num_nodes if self.method.tree else 1
        return nodes * self.heads.schedule.heads if self.heads else nodes

    def steps(self, requests: Iterable[Request | None]) -> Iterator[StepOutput]:
        """Yields the outcome of every target call as it happens. UserError if another run of this engine, in
        any thread, has neither ended nor been closed: both would write into the same caches."""
        if not self._decoding.acquire(blocking=False):
            raise UserError("this engine decodes other images: end that run first, or take another engine")
        try:
            yield from self._steps(requests)
        finally:
            self._decoding.release()

    def _steps(self, requests: Iterable[Request | None]) -> Iterator[StepOutput]:
        if self.heads is not None:
            return several_rows(cast(RowTarget, self.target), self.heads, requests, self.sampling)
        if self.drafting is None:
            noise = Noise(self.target.num_codes, silent=self.sampling.greedy)
            return autoregressive(self.target, requests, self.sampling, noise)
        return speculative(self.target, *self.drafting, requests, self.sampling)

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yields images as they finish."""
        return finished(self.steps(requests))


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """Returns an engine with room for `slots` images in flight and prompts of max_prompt tokens.

    The method's row of adt_tree.method.METHODS names the module that drafts; its function `make` gives the
    proposer and the rule. UserError if the model's codebook is too small for the method's trees or
    neighbours, NoRoom if the largest tree does not fit the model's positions or memory.
    """
    sampling = replace(method.sampling, top_p_first=method.rules == "reference")
    schedule = Schedule.of(method.several_rows, model.grid) if method.several_rows else None
    if schedule is not None and not schedule.raster_order:
        shape = method.tree.largest if method.tree is not None and method.drafting else ROOT_ONLY
        target = model.target(slots, sampling, schedule.heads * shape.num_nodes, max_prompt)
        return Engine(
            method, sampling, target, heads=make_heads(model, method, sampling, target, shape, schedule)
        )
    if method.tree is None or not method.drafting:
        return Engine(method, sampling, model.target(slots, sampling, 1, max_prompt))
    largest = method.tree.largest
    if largest.width > model.num_codes:
        raise UserError(
            f"a tree {largest.width} nodes wide: the codebook has {model.num_codes} codes; give less "
            "(--draft_top_k, --adt_width_max)"
        )
    target = model.target(slots, sampling, largest.num_nodes, max_prompt)
    setup = MethodOnModel(model, method, sampling, target, largest)
    proposer, rule = import_module(method.spec.module).make(setup)
    policy = method.tree.policy(model.grid, slots, model.codebook.device.type != "cpu")
    return Engine(method, sampling, target, (proposer, policy, rule))
