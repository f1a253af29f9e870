"""Parity with the released decoder: greedy tokens and accept lengths, two prompts side by side."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from adt_tree.decode import autoregressive, speculative
from adt_tree.eagle import EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from adt_tree.tree import STATIC_TREES, StaticTree
from adt_tree.verify import Coupled, GreedyRelaxed
from models.drafter import EagleDrafter
from models.target import ARTarget, Prompt
from tests.golden import FIRST_CODE, UNCONDITIONAL, Anole, anole, tensors, values

CODES = 8192
SAMPLING = Sampling(temperature=0.0, guidance=3.0)
LENGTH = 48  # codes compared; all of the recorded ones agree, this many keep the test short
SPARE = 6  # codes beyond these, so that no tree that is compared is cut
MODES = {"exact": None, "lantern_k10_d0p3": 0.3, "lantern_k10_d2p0": 2.0}


@pytest.fixture(scope="module")
def models() -> Anole:
    """The recorded models."""
    return anole()


def make_target(models: Anole, codes: int) -> ARTarget:
    """Room for both prompts and the largest tree."""
    return ARTarget(models.decoder, Grid(codes, 1), FIRST_CODE, CODES, 2, 2, 40, 59)


def requests(models: Anole, run: str) -> list[Request]:
    """The recorded prompts of a run, named by their number."""
    recorded = tensors("anole_e2e")
    numbers = [n for n in range(len(models.prompts)) if f"prompt{n}.{run}" in recorded]
    return [Request(str(n), Prompt(models.prompts[n], UNCONDITIONAL), 0) for n in numbers]


def leaf_order(name: str) -> torch.Tensor:
    """Rank of each leaf among the released code's candidate rows."""
    tree = values("static_trees")[name]
    order = torch.full((len(tree["positions"]),), len(tree["retrieve"]))
    for row, nodes in enumerate(tree["retrieve"]):
        order[max(nodes)] = row
    return order


def decode(models: Anole, tree: str, mode: str) -> Iterable[Decoded]:
    """The released settings: 58 drafted nodes, 5 levels, 10 wide; or a static tree."""
    target, delta = make_target(models, LENGTH + SPARE), MODES[mode]
    drafter = EagleDrafter(models.net, target, 5, 10)
    if tree == "dynamic":
        growth, policy, order = grow_dynamic, Fixed(TreeShape(5, 10, 58)), None
    else:
        static = StaticTree(STATIC_TREES[tree])
        growth, order = StaticGrowth(static, False, target.device), leaf_order(tree)
        policy = Fixed(TreeShape(static.depth, static.width, len(static.parents) - 1))
    rule = Coupled(Noise(CODES, silent=True))
    if delta is not None:
        rule = GreedyRelaxed(CODES, Relaxation(models.nearest, 10, delta), order)
    images = requests(models, f"{tree}.{mode}.tokens")
    return speculative(target, EagleProposer(drafter, SAMPLING, growth, 2), policy, rule, images, SAMPLING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", ["dynamic", "naive_extend_57", "mc_sim_7b_63"])
def test_tokens_and_accept_lengths(models: Anole, tree: str, mode: str) -> None:
    expected = tensors("anole_e2e")
    images = list(decode(models, tree, mode))
    assert images
    for image in images:
        key = f"prompt{image.name}.{tree}.{mode}"
        assert image.codes[:LENGTH] == expected[f"{key}.tokens"][:LENGTH].tolist()
        whole = [step.accepted for step in image.steps if step.position <= LENGTH]
        assert whole == expected[f"{key}.accept_lengths"][: len(whole)].tolist()
        assert sum(whole) + len(whole) >= LENGTH


def test_plain_greedy_tokens(models: Anole) -> None:
    expected = tensors("anole_e2e")
    target = make_target(models, LENGTH)
    noise = Noise(CODES, silent=True)
    for image in autoregressive(target, requests(models, "base_greedy_tokens"), SAMPLING, noise):
        assert image.codes == expected[f"prompt{image.name}.base_greedy_tokens"][:LENGTH].tolist()
