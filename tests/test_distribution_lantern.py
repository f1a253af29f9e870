"""Relaxed acceptance: no budget is the exact rule, and the distribution moves within the stated bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adt_tree.method import Lantern, Method
from adt_tree.noise import Noise
from adt_tree.relax import Relaxation, nearest_table
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Rejection, Rule
from tests.decoding import codes_of, tree_of
from tests.test_distribution import ADAPT, DYNAMIC, FIXED, GUIDED, MC_SIM, OWN, images_of

GREEDY = Sampling(temperature=0.0, guidance=1.5)
VERTICAL = replace(ADAPT, init="vertical")
METHODS = [
    *(Method(name, own, tree) for own in (GUIDED, GREEDY) for name, tree in (DYNAMIC[0], DYNAMIC[1], *OWN)),
    Method("eagle-1", GUIDED, MC_SIM),
    Method("adt-tree", GUIDED, VERTICAL, verify="rejection"),
    Method("eagle-1", GUIDED, MC_SIM, verify="rejection"),
    Method("eagle-2", GUIDED, FIXED, verify="rejection", rules="reference"),
    Method("eagle-1", GUIDED, "chain", verify="rejection", rules="reference"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_budget_of_nothing_is_exact(method: Method) -> None:
    """No neighbour or no mass: token for token; with both, other images."""

    def codes(delta: float, k: int) -> dict[str, list[int]]:
        return codes_of(images_of(replace(method, lantern=Lantern(delta, k)), 512, slots=64))

    exact = codes_of(images_of(method, 512, slots=64))
    assert codes(0.5, 0) == codes(3.0, 0) == codes(0.0, 2) == exact
    assert codes(0.9, 2) != exact


SAMPLES, WIDE = 40_000, 12


def siblings(drafts: list[int]) -> DraftTree:
    """SAMPLES roots with the same children."""
    codes = torch.tensor([0, *drafts]).expand(SAMPLES, -1)
    return tree_of(codes, torch.zeros_like(codes))


def one_step(rule: Rule, tree: DraftTree, p: Tensor) -> Tensor:
    """The measured distribution of the first code a step commits."""
    seeds, positions = torch.arange(SAMPLES), torch.ones(SAMPLES, dtype=torch.int64)
    log_p = p.log().expand(SAMPLES, tree.nodes, -1)
    perturbed = log_p + rule.noise.gumbel(seeds, positions[:, None] + tree.depths)
    verdict = rule(tree, log_p, perturbed, seeds, positions)
    return torch.bincount(verdict.codes[:, 0], minlength=len(p)) / SAMPLES


def wide_distribution() -> tuple[Tensor, Tensor]:
    """A distribution over WIDE codes and a table of their neighbours."""
    generator = torch.Generator().manual_seed(5)
    p = (1.3 * torch.randn(WIDE, generator=generator)).softmax(-1)
    return p, nearest_table(torch.randn(WIDE, 3, generator=generator), WIDE - 1)


def relaxed(kind: str, relaxation: Relaxation) -> Rule:
    """The rule over WIDE codes."""
    if kind == "coupled":
        return Coupled(Noise(WIDE, silent=False), relaxation)
    return Rejection(WIDE, False, relaxation)


@pytest.mark.parametrize(("k", "delta"), [(3, 0.05), (8, 0.1), (8, 0.4), (4, 2.0), (8, 3.0)])
@pytest.mark.parametrize("kind", ["coupled", "rejection"])
def test_total_variation_is_within_the_budget(kind: str, k: int, delta: float) -> None:
    """Given the drafted code, a step's distribution differs from p by the mass borrowed, which the budget
    bounds."""
    p, near = wide_distribution()
    relaxation = Relaxation(near, k, delta)
    moved = 0.0
    for draft in range(0, WIDE, 2):
        _, _, mass = relaxation.aggregate(p, torch.tensor(draft))
        measured = one_step(relaxed(kind, relaxation), siblings([draft]), p)
        variation = 0.5 * float((measured - p).abs().sum())
        assert float(mass) <= (delta if delta <= 1 else (delta - 1) * float(p[draft])) + 1e-6
        assert variation == pytest.approx(float(mass), abs=0.012)
        assert float(measured[draft] - p[draft]) == pytest.approx(float(mass), abs=0.012)
        moved = max(moved, float(mass))
    assert moved > 0.012


@pytest.mark.parametrize("kind", ["coupled", "rejection"])
def test_siblings_borrow_once_each(kind: str) -> None:
    """With w children the budgets add up at most; codes in no set keep their probability."""
    p, near = wide_distribution()
    measured = one_step(relaxed(kind, Relaxation(near, 3, 0.08)), siblings([1, 4, 7]), p)
    assert 0.5 * float((measured - p).abs().sum()) <= 3 * 0.08 + 0.012
    exact = one_step(Coupled(Noise(WIDE, silent=False)), siblings([1, 4, 7]), p)
    assert 0.5 * float((exact - p).abs().sum()) < 0.012


def test_coupled_prefers_the_exact_match_then_the_nearest() -> None:
    """Every drafted code that y equals wins over sets that hold y; among sets the one that ranks y first."""
    p = torch.full((4,), 0.25)
    table = torch.tensor([[1, 2, 3], [2, 0, 3], [3, 1, 0], [2, 1, 0]])
    rule = Coupled(Noise(4, silent=False), Relaxation(table, 2, 1.0))
    tree = siblings([0, 1])  # y = 2: second neighbour of 0, first of 1
    log_p = p.log().expand(SAMPLES, 3, -1)
    for wanted, taken in ((0, 0), (1, 1), (2, 1), (3, 3)):
        perturbed = log_p.clone()
        perturbed[:, 0, wanted] += 9.0
        verdict = rule(tree, log_p, perturbed, torch.arange(SAMPLES), torch.ones(SAMPLES, dtype=torch.int64))
        assert bool((verdict.codes[:, 0] == taken).all())
        assert bool((verdict.count == (2 if taken < 2 else 1)).all())
