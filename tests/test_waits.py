"""A cycle makes the host wait for the device once: when it fetches what was committed. Every proposer, policy
and rule, guided and not, with row ends and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from adt_tree.decode import autoregressive, speculative
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import INITS, Fixed
from adt_tree.records import Decoded
from adt_tree.roles import Request, Target
from adt_tree.sampling import Sampling
from adt_tree.tree import STATIC_TREES, DraftTree, to_device
from adt_tree.verify import Coupled, Verdict
from models.separators import SeparatorTarget
from tests import test_engine_separators as separators
from tests.reads import Reads
from tests.test_engine import ADAPT, CODES, GRID, IMAGES, LAWS, Method, coupled, make_target, sampled_methods
from tests.test_self_draft import ADAPTIVE, SHAPES, hybrid, self_drafter

SLOTS = 2
Decode = Callable[[list[Request]], Iterator[Decoded]]


def waits(target: Target, decode: Decode, images: list[Request]) -> tuple[list[str], int]:
    """What the cycles of a run wait for, from the first target pass on, and how many cycles there are.

    All images set out together, so that nothing is prefilled once the cycles have begun. Tables by shape are
    made at the first sight of one: the images are drawn twice, and the second time is watched.
    """
    list(decode(images))
    cycles, forward = [], target.forward
    with Reads() as reads:

        def watched(tree: DraftTree, committed: list[int]) -> object:
            if not cycles:
                reads.log.clear()
            cycles.append(committed)
            return forward(tree, committed)

        target.forward = watched
        list(decode(images))
    return reads.log, len(cycles)


def speculated(target: Target, *roles: object) -> Decode:
    """speculative() with proposer, policy, rule and law."""
    *players, law = roles
    return lambda images: speculative(target, *players, images, law)


@pytest.mark.parametrize("law", ["sampled", "greedy unguided", "filtered"])
def test_plain_decoding(law: str) -> None:
    target, noise = make_target(SLOTS, LAWS[law].branches), Noise(CODES, silent=LAWS[law].greedy)
    log, cycles = waits(target, lambda i: autoregressive(target, i, LAWS[law], noise), IMAGES[:SLOTS])
    assert cycles == GRID.size - 1 and log == ["tolist"] * cycles


def methods() -> list[Method]:
    """The drafter network with every policy and static tree, coupled; then every other rule."""
    trees = ("fixed", *INITS, *STATIC_TREES)
    return [Method(tree, Coupled(Noise(CODES, silent=False))) for tree in trees] + sampled_methods()


@pytest.mark.parametrize("method", methods(), ids=lambda m: f"{m.tree} {type(m.rule).__name__}")
def test_drafter_network(method: Method) -> None:
    law = replace(LAWS["filtered"], temperature=0.0 if "Greedy" in type(method.rule).__name__ else 1.0)
    target = make_target(SLOTS, law.branches)
    decode = speculated(target, method.proposer(target, law), method.policy(SLOTS), method.rule, law)
    log, cycles = waits(target, decode, IMAGES[:SLOTS])
    assert log == ["tolist"] * cycles


@pytest.mark.parametrize("law", ["sampled", "greedy unguided"])
@pytest.mark.parametrize("shape", [*SHAPES, *ADAPTIVE])
@pytest.mark.parametrize("kind", ["self-draft", "hybrid"])
def test_self_drafting(kind: str, shape: str, law: str) -> None:
    target = make_target(SLOTS, LAWS[law].branches)
    policy = ADAPTIVE[shape](ADAPT, SLOTS) if shape in ADAPTIVE else Fixed(SHAPES[shape])
    proposer = (
        self_drafter(GRID, SLOTS, 5, "both") if kind == "self-draft" else hybrid(target, LAWS[law], SLOTS, 5)
    )
    log, cycles = waits(
        target, speculated(target, proposer, policy, coupled(LAWS[law]), LAWS[law]), IMAGES[:SLOTS]
    )
    assert log == ["tolist"] * cycles


@pytest.mark.parametrize("kind", ["dynamic", "static", "self-draft"])
def test_row_ends(kind: str) -> None:
    law = Sampling()
    target = separators.make_target(SLOTS, law.branches, Grid(4, 4))
    proposer, shape = separators.proposer_of(kind, target, law)
    assert isinstance(target, SeparatorTarget)
    decode = speculated(target, proposer, Fixed(shape), coupled(law), law)
    log, cycles = waits(target, decode, separators.IMAGES[:SLOTS])
    assert log == ["tolist"] * cycles


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
    log, cycles = waits(
        target, speculated(target, proposer, policy, Impatient(look), Sampling()), IMAGES[:SLOTS]
    )
    assert len(log) >= 2 * cycles


def test_to_device() -> None:
    moved = to_device([(1, 2), (3, 4)], torch.device("cpu"))
    assert moved.dtype == torch.int64 and moved.tolist() == [[1, 2], [3, 4]]
