"""A step makes the host wait for the device once: when it fetches what was committed. Every proposer, policy
and rule, guided and not, with row separators and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from adt_tree.decode import autoregressive, speculative
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import INITS, Fixed, Policy
from adt_tree.records import Decoded
from adt_tree.roles import Proposer, Request, Target
from adt_tree.sampling import Sampling
from adt_tree.tree import STATIC_TREES, DraftTree, to_device
from adt_tree.verify import Coupled, GreedyRelaxed, Rule, Verdict
from tests import test_engine_separators as separators
from tests.reads import Reads
from tests.test_engine import CODES, GRID, IMAGES, SAMPLINGS, Method, coupled, make_target, sampled_methods
from tests.test_self_draft import KINDS, POLICIES, SHAPES, policy_of, proposer_of, self_drafter

SLOTS = 2


def waits(target: Target, decode: Callable[[], Iterator[Decoded]]) -> tuple[list[str], int]:
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


def drafted_waits(
    target: Target,
    proposer: Proposer,
    policy: Policy,
    rule: Rule,
    sampling: Sampling,
    images: list[Request] = IMAGES,
) -> tuple[list[str], int]:
    """waits() of a speculative run."""
    return waits(target, lambda: speculative(target, proposer, policy, rule, images[:SLOTS], sampling))


@pytest.mark.parametrize("name", ["sampled", "greedy unguided", "filtered"])
def test_ar_baseline(name: str) -> None:
    sampling = SAMPLINGS[name]
    target, noise = make_target(SLOTS, sampling.branches), Noise(CODES, silent=sampling.greedy)
    log, steps = waits(target, lambda: autoregressive(target, IMAGES[:SLOTS], sampling, noise))
    assert steps == GRID.size - 1 and log == ["tolist"] * steps


def methods() -> list[Method]:
    """The drafter network with every policy and static tree, coupled; then every other rule."""
    trees = ("fixed", *INITS, *STATIC_TREES)
    return [Method(tree, Coupled(Noise(CODES, silent=False))) for tree in trees] + sampled_methods()


@pytest.mark.parametrize("method", methods(), ids=lambda m: f"{m.tree} {type(m.rule).__name__}")
def test_drafter_network(method: Method) -> None:
    temperature = 0.0 if isinstance(method.rule, GreedyRelaxed) else 1.0
    sampling = replace(SAMPLINGS["filtered"], temperature=temperature)
    target = make_target(SLOTS, sampling.branches)
    proposer, policy = method.proposer(target, sampling), method.policy(SLOTS)
    log, steps = drafted_waits(target, proposer, policy, method.rule, sampling)
    assert log == ["tolist"] * steps


@pytest.mark.parametrize("name", ["sampled", "greedy unguided"])
@pytest.mark.parametrize("shape", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_self_drafting(kind: str, shape: str, name: str) -> None:
    sampling = SAMPLINGS[name]
    target = make_target(SLOTS, sampling.branches)
    proposer, policy = proposer_of(kind, target, sampling, SLOTS, "both"), policy_of(shape, SLOTS)
    log, steps = drafted_waits(target, proposer, policy, coupled(sampling), sampling)
    assert log == ["tolist"] * steps


@pytest.mark.parametrize("kind", ["dynamic", "static", "self-draft"])
def test_row_separators(kind: str) -> None:
    sampling = Sampling()
    target = separators.make_target(SLOTS, sampling.branches, Grid(4, 4))
    proposer, shape = separators.proposer_of(kind, target, sampling)
    rule = coupled(sampling)
    log, steps = drafted_waits(target, proposer, Fixed(shape), rule, sampling, separators.IMAGES)
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
    proposer, policy = self_drafter(GRID, SLOTS, 5, "above"), Fixed(SHAPES["tree"])
    log, steps = drafted_waits(target, proposer, policy, Impatient(look), Sampling())
    assert len(log) >= 2 * steps


def test_to_device() -> None:
    moved = to_device([(1, 2), (3, 4)], torch.device("cpu"))
    assert moved.dtype == torch.int64 and moved.tolist() == [[1, 2], [3, 4]]
