"""In a step the host waits for the device once, to read the committed codes. This holds for every proposer,
policy and rule, with and without guidance and row lined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from adt_tree.batch import StepOutput
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.roles import Target
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict
from tests import test_row_ends as lined
from tests.reads import Reads
from tests.test_engine import (
    CODES,
    FILTERED,
    GUMBEL,
    IMAGES,
    PLAIN,
    TREE,
    drafted_methods,
    exact_methods,
    new_engine,
    one_of_each,
)  # fmt: skip

SLOTS = 2
NOISE = Noise(CODES, silent=False)


def waits(target: Target, decode: Callable[[], Iterator[StepOutput]]) -> tuple[list[str], int]:
    """Returns the operations for which the steps of a run wait, and the number of steps. Operations before
    the first target pass are left out.

    All images start together, so no prefill follows the first step. The first use of a shape makes its
    tables, so the images are generated twice, and the second run is watched.
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


CASES = one_of_each([*exact_methods(FILTERED), *drafted_methods(FILTERED), *GUMBEL])
CASES += one_of_each(exact_methods(PLAIN))


@pytest.mark.parametrize("method", CASES, ids=str)
def test_a_step_waits_once(method: Method) -> None:
    decoder = new_engine(method, SLOTS)
    log, steps = waits(decoder.target, lambda: decoder.steps(IMAGES[:SLOTS]))
    assert log == ["tolist"] * steps


@pytest.mark.parametrize("name", ["eagle-2", "eagle-1", "self-draft"])
def test_row_ends(name: str) -> None:
    decoder = lined.new_engine(Method(name, Sampling(), lined.TREES[name]), SLOTS)
    log, steps = waits(decoder.target, lambda: decoder.steps(lined.IMAGES[:SLOTS]))
    assert log == ["tolist"] * steps


class Impatient(Coupled):
    """A rule that reads its verdict on the host before it returns it."""

    def __init__(self, look: Callable[[Verdict], object]) -> None:
        super().__init__(NOISE)
        self._look = look

    def __call__(self, *arguments: object) -> Verdict:
        verdict = super().__call__(*arguments)
        self._look(verdict)
        return verdict


@pytest.mark.parametrize(
    "look",
    [
        lambda v: v.count.max().item(),
        lambda v: v.codes[v.codes > 3],
        lambda v: torch.tensor([1, 2], device=v.codes.device),
        lambda v: v.count.__setitem__(0, 1),
    ],
)
def test_the_check_sees_a_wait(look: Callable[[Verdict], object]) -> None:
    decoder = new_engine(Method("self-draft", Sampling(), TREE), SLOTS)
    decoder = replace(decoder, drafting=(*decoder.drafting[:2], Impatient(look)))
    log, steps = waits(decoder.target, lambda: decoder.steps(IMAGES[:SLOTS]))
    assert len(log) >= 2 * steps
