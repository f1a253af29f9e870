"""In a step the host waits for the device once, to read the committed codes. This holds for every proposer,
policy and rule, with and without guidance and row ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from adt_tree.batch import StepOutput
from adt_tree.decode import speculative
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.roles import Target
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict
from tests.adt_tree import test_row_ends as lined
from tests.adt_tree.test_engine import (
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
from tests.support.reads import Reads

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


CASES = [(m, False) for m in one_of_each([*exact_methods(FILTERED), *drafted_methods(FILTERED), *GUMBEL])]
CASES += [(Method("eagle-2", PLAIN, TREE), False)]
CASES += [
    (Method(name, Sampling(), lined.TREES[name]), True) for name in ("eagle-2", "eagle-1", "self-draft")
]


@pytest.mark.parametrize(("method", "row_ends"), CASES, ids=str)
def test_a_step_waits_once(method: Method, row_ends: bool) -> None:
    make, images = (lined.new_engine, lined.IMAGES) if row_ends else (new_engine, IMAGES)
    decoder = make(method, SLOTS)
    log, steps = waits(decoder.target, lambda: decoder.steps(images[:SLOTS]))
    assert log == ["tolist"] * steps


class Impatient(Coupled):
    """A rule for which the host waits in four ways: it reads a number, selects by a mask, and copies a list
    and a number from pageable memory."""

    def __call__(self, *arguments: Tensor) -> Verdict:
        verdict = super().__call__(*arguments)
        codes, count = verdict.codes, verdict.count
        count.max().item(), codes[codes > 3], torch.tensor([1, 2], device=codes.device)
        count[0] = 1
        return verdict


def test_the_check_sees_a_wait() -> None:
    decoder = new_engine(Method("self-draft", Sampling(), TREE), SLOTS)
    *parts, _, noise = decoder.loop.args
    loop = partial(speculative, *parts, Impatient(NOISE), noise, sampling=Sampling())
    decoder = replace(decoder, loop=loop)
    log, steps = waits(decoder.target, lambda: decoder.steps(IMAGES[:SLOTS]))
    assert len(log) == 5 * steps
