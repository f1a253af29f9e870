"""A step makes the host wait for the device once: when it fetches what was committed. Every proposer, policy
and rule, guided and not, with row separators and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, speculative
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import Fixed
from adt_tree.roles import Target
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree, to_device
from adt_tree.verify import Coupled, GreedyRelaxed, Verdict
from tests import test_engine_separators as separators
from tests.reads import Reads
from tests.test_engine import (
    CODES,
    GRID,
    IMAGES,
    SAMPLINGS,
    Method,
    coupled,
    exact_methods,
    make_target,
    sampled_methods,
)

SLOTS = 2


def waits(target: Target, decode: Callable[[], Iterator[StepOutput]]) -> tuple[list[str], int]:
    """What the steps of a run wait for, from the first target pass on, and how many steps there are.

    All images set out together, so that nothing is prefilled once the steps have begun. Tables by shape are
    made at the first sight of one: the images are made twice, and the second time is watched.
    """
    list(decode())
    steps, forward = [], target.forward
    with Reads() as reads:

        def watched(tree: DraftTree, committed: list[int]) -> object:
            if not steps:
                reads.log.clear()
            steps.append(committed)
            return forward(tree, committed)

        target.forward = watched
        list(decode())
    return reads.log, len(steps)


@pytest.mark.parametrize("name", ["sampled", "greedy unguided", "filtered"])
def test_ar_baseline(name: str) -> None:
    sampling = SAMPLINGS[name]
    target, noise = make_target(SLOTS, sampling.branches), Noise(CODES, silent=sampling.greedy)
    log, steps = waits(target, lambda: autoregressive(target, IMAGES[:SLOTS], sampling, noise))
    assert steps == GRID.size - 1 and log == ["tolist"] * steps


CASES = [(method, "filtered") for method in (*exact_methods(Sampling()), *sampled_methods())]
CASES += [(method, "greedy unguided") for method in exact_methods(SAMPLINGS["greedy"])]


@pytest.mark.parametrize(("method", "name"), CASES, ids=str)
def test_a_step_waits_once(method: Method, name: str) -> None:
    sampling = SAMPLINGS[name]
    if isinstance(method.rule, GreedyRelaxed):
        sampling = replace(sampling, temperature=0.0)
    target = make_target(SLOTS, sampling.branches)
    log, steps = waits(target, lambda: method.steps(target, sampling, IMAGES[:SLOTS]))
    assert log == ["tolist"] * steps


@pytest.mark.parametrize("kind", ["dynamic", "static", "self-draft"])
def test_row_separators(kind: str) -> None:
    sampling = Sampling()
    target = separators.make_target(SLOTS, sampling.branches, Grid(4, 4))
    proposer, shape = separators.proposer_of(kind, target, sampling)
    given = (target, proposer, Fixed(shape), coupled(sampling), separators.IMAGES[:SLOTS], sampling)
    log, steps = waits(target, lambda: speculative(*given))
    assert log == ["tolist"] * steps


class Impatient(Coupled):
    """A rule that looks at its verdict before it gives it."""

    def __init__(self, look: Callable[[Verdict], object]) -> None:
        super().__init__(Noise(CODES, silent=False))
        self._look = look

    def __call__(self, *given: object) -> Verdict:
        """Judge, then let the test look at the verdict."""
        verdict = super().__call__(*given)
        self._look(verdict)
        return verdict


@pytest.mark.parametrize(
    "look",
    [
        lambda v: v.count.max().item(),
        lambda v: bool((v.count > 1).all()),
        lambda v: v.codes[v.codes > 3],
        lambda v: v.codes.nonzero(),
        lambda v: v.codes.unique(),
        lambda v: v.codes[:, [0]],
        lambda v: v.codes.masked_select(v.codes > 3),
        lambda v: v.codes.cpu(),
        lambda v: v.codes.repeat_interleave(v.count, dim=0),
        lambda v: torch.tensor([1, 2], device=v.codes.device),
        lambda v: v.codes.to(torch.device("cpu")),
        lambda v: range(v.count[0]),
    ],
)
def test_the_check_sees_a_wait(look: Callable[[Verdict], object]) -> None:
    target = make_target(SLOTS, 2)
    method = Method("tree", Impatient(look), "self-draft")
    log, steps = waits(target, lambda: method.steps(target, Sampling(), IMAGES[:SLOTS]))
    assert len(log) >= 2 * steps


def test_to_device() -> None:
    moved = to_device([(1, 2), (3, 4)], torch.device("cpu"))
    assert moved.dtype == torch.int64 and moved.tolist() == [[1, 2], [3, 4]]
