"""Puts a method on a model: makes its target, proposer, tree policy, verification rule and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import Lock

from adt_tree.batch import BatchSlots, StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.errors import UserError
from adt_tree.method import Method
from adt_tree.method_on_model import MethodOnModel
from adt_tree.noise import Noise
from adt_tree.noise_table import NoiseTable
from adt_tree.records import Decoded
from adt_tree.roles import Model, Request, Target
from adt_tree.surroundings import own_settings, with_own_settings
from adt_tree.verify import Rule

Loop = Callable[[Iterable[Request | None]], Iterator[StepOutput]]  # yields the outcome of every target call


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that one method needs on one model. It makes the images of one run at a time."""

    method: Method
    target: Target
    loop: Loop
    max_nodes: int  # the largest number of nodes of a pass over one image
    _decoding: Lock = field(default_factory=Lock, compare=False, repr=False)  # held while steps are taken

    def steps(self, requests: Iterable[Request | None]) -> Iterator[StepOutput]:
        """Yields the outcome of every target call as it happens. UserError if another run of this engine, in
        any thread, has neither ended nor been closed: both would write into the same caches."""
        if not self._decoding.acquire(blocking=False):
            raise UserError("this engine decodes other images: end that run first, or take another engine")
        try:
            yield from with_own_settings(self.loop(requests))
        finally:
            self._decoding.release()

    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yields images as they finish."""
        return finished(self.steps(requests))


@own_settings()
def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """Returns an engine with room for `slots` images in flight and prompts of max_prompt tokens. It is built
    under own_settings(), as it decodes.

    UserError if the model's codebook is too small for the method's trees or neighbours, NoRoom if the largest
    tree does not fit the model's positions or memory.
    """
    relaxed = method.relaxed_rule
    if relaxed is not None and relaxed.module is not None:
        return import_module(relaxed.module).build(model, method, slots, max_prompt)
    return one_loop(model, method, slots, max_prompt)


def one_loop(model: Model, method: Method, slots: int, max_prompt: int, rule: Rule | None = None) -> Engine:
    """Returns an engine that commits the codes of an image one after the other.

    The method's row of adt_tree.method.METHODS names the module that drafts; its function `make` gives the
    proposer and the rule. rule: takes the place of that rule. Errors as in build().
    """
    sampling = method.ordered_sampling
    if method.tree is None or method.spec.module is None or not method.drafting:
        target = model.target(slots, sampling, 1, max_prompt)
        noise = NoiseTable(Noise(target.num_codes, silent=sampling.greedy), target, 1)
        in_flight = BatchSlots(target, noise, [target.release], sampling)
        return Engine(method, target, partial(autoregressive, target, in_flight), 1)
    largest = method.tree.largest
    if largest.width > model.num_codes:
        raise UserError(
            f"tree.width {largest.width}: the codebook has {model.num_codes} codes; give at most these"
        )
    target = model.target(slots, sampling, largest.num_nodes, max_prompt)
    proposer, own_rule = import_module(method.spec.module).make(
        MethodOnModel(model, method, target, target, largest)
    )
    policy = method.tree.policy(model.grid, slots, model.codebook.device.type != "cpu")
    rule = rule or own_rule
    noise = NoiseTable(rule.noise, target, largest.depth + 1)
    in_flight = BatchSlots(target, noise, [target.release, proposer.release], sampling)
    loop = partial(speculative, target, proposer, policy, rule, in_flight)
    return Engine(method, target, loop, largest.num_nodes)
