"""Traversal and recursive rejection over every tree that could be drafted: the law is the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from adt_tree.tree import DraftTree, StaticTree, chain
from adt_tree.verify import Rejection, Verdict, verdict_from_hits
from eval import traversal as module
from eval.traversal import End, Sampled, accepted, rejection, traversal
from tests.tabular import CODES, append, states

LENGTH = 3  # codes whose law is compared: two drafted levels and one more
PAIRS = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
LONE = StaticTree([[0], [1], [0, 0]])
STEM = StaticTree(chain(2))
RULES = {"rejection": rejection, "traversal": traversal}
Ends = Callable[[Sampled], Iterator[End]]


def laws(seed: int, scale: float = 1.5) -> Tensor:
    """A law [S, V] after every prefix, fp64."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(states(LENGTH), CODES, generator=generator)).double().softmax(dim=-1)


def enumerate_trees(tree: StaticTree, p: Tensor, q: Tensor) -> tuple[Sampled, Tensor, Tensor]:
    """All drafts of a topology, their probabilities [B] and the state [B, N] of every node (the root's is the
    empty prefix)."""
    counts = [tree.parents[1:].count(node) for node in range(len(tree.parents))]
    inner = [node for node, count in enumerate(counts) if count]
    codes, chances, nodes = [], [], []
    for lists in product(*(permutations(range(CODES), counts[node]) for node in inner)):
        below = {node: iter(draws) for node, draws in zip(inner, lists, strict=True)}
        code, state, chance = [0], [0], 1.0
        for node in range(1, len(tree.parents)):
            code.append(next(below[tree.parents[node]]))
            state.append(int(append(torch.tensor(state[tree.parents[node]]), torch.tensor(code[-1]))))
        for node, draws in zip(inner, lists, strict=True):
            left = 1.0
            for draw in draws:
                chance *= float(q[state[node], draw]) / left
                left -= float(q[state[node], draw])
        codes.append(code)
        chances.append(chance)
        nodes.append(state)
    at = torch.tensor(nodes)
    drafted = torch.tensor(codes)
    sampled = Sampled(
        tree, drafted, torch.ones_like(drafted, dtype=torch.bool), p[at[:, inner]], q[at[:, inner]]
    )
    return sampled, torch.tensor(chances, dtype=torch.float64), at


def committed(rule: Ends, sampled: Sampled, chances: Tensor, at: Tensor, p: Tensor) -> Tensor:
    """The law [S] of the first LENGTH codes, whatever a cycle did not commit being drawn from p."""
    mass = torch.zeros(states(LENGTH), dtype=torch.float64)
    for node, end, law in rule(sampled):
        law = p[at[:, node]] if law is None else law
        reached = append(at[:, node, None], torch.arange(CODES))
        mass.index_add_(0, reached.flatten(), ((chances * end)[:, None] * law).flatten())
    for state in range(states(LENGTH - 1)):
        mass[state * CODES + 1 : (state + 1) * CODES + 1] += mass[state] * p[state]
    return mass[states(LENGTH - 1) :]


def expected(p: Tensor) -> Tensor:
    """The law of the first LENGTH codes."""
    mass = torch.ones(1, dtype=torch.float64)
    first = 0
    for _ in range(LENGTH):
        mass = (mass[:, None] * p[first : first + len(mass)]).flatten()
        first = first * CODES + 1
    return mass


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("tree", [PAIRS, LONE, STEM], ids=["pairs", "lone", "stem"])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s(rule: str, tree: StaticTree, scale: float) -> None:
    p, q = laws(1, scale), laws(2, scale)
    drafts = enumerate_trees(tree, p, q)
    assert float(drafts[1].sum()) == pytest.approx(1)
    torch.testing.assert_close(committed(RULES[rule], *drafts, p), expected(p), atol=1e-9, rtol=0)


def test_control_a_weight_that_is_not_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = laws(1), laws(2)
    drafts = enumerate_trees(PAIRS, p, q)
    monkeypatch.setattr(module, "capped", lambda weight: weight)
    assert float((committed(traversal, *drafts, p) - expected(p)).abs().max()) > 1e-3


def test_control_a_draw_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = laws(1), laws(2)
    drafts = enumerate_trees(PAIRS, p, q)
    monkeypatch.setattr(module, "_without", lambda q, code: q)
    for rule in RULES.values():
        assert float((committed(rule, *drafts, p) - expected(p)).abs().max()) > 1e-3


def test_on_a_chain_it_is_block_verification() -> None:
    """2403.10444: w_i = min(1, w_{i-1} p / q), h_i = S_i / (S_i + 1 - w_i), h_L = w_L; last u_i <= h_i."""
    drafts, _, _ = enumerate_trees(StaticTree(chain(3)), laws(1), laws(2))
    weight = torch.ones(len(drafts.codes), dtype=torch.float64)
    heights = []
    for level in range(3):
        p, q = drafts.laws(level)
        left = (weight[:, None] * p - q).clamp_min(0).sum(dim=1)
        heights.append(left / (left + 1 - weight))
        code = drafts.codes[:, level + 1, None]
        weight = (weight * (p.gather(1, code) / q.gather(1, code))[:, 0]).clamp(max=1)
    heights.append(weight)
    length, none_below = torch.zeros_like(weight), torch.ones_like(weight)
    for level in (3, 2, 1):
        length += level * none_below * heights[level]
        none_below *= 1 - heights[level]
    torch.testing.assert_close(accepted(drafts, traversal(drafts)), length)


def test_traversal_accepts_more_on_average() -> None:
    p, q = laws(1), laws(2)
    for tree in (PAIRS, STEM):
        drafts, chances, _ = enumerate_trees(tree, p, q)
        lengths = [float((chances * accepted(drafts, rule(drafts))).sum()) for rule in RULES.values()]
        assert lengths[1] > lengths[0] + 1e-3


def judged(drafts: Sampled, p: Tensor, seed: int) -> Verdict:
    """verify.Rejection on the same trees, under one draw of its uniforms."""
    images, nodes = drafts.codes.shape
    parents, depths = (torch.tensor(x).expand(images, -1) for x in (drafts.tree.parents, drafts.tree.depths))
    q = torch.zeros(images, nodes, CODES)
    q[:, drafts.inner] = drafts.q.float()
    tree = DraftTree(
        drafts.codes, parents, depths, drafts.tree.ancestors().expand(images, -1, -1), drafts.valid,
        drafts.tree.depth, drafts.tree.width, q,
    )  # fmt: skip
    chances = torch.rand(images, nodes, generator=torch.Generator().manual_seed(seed))
    hit, residual = Rejection(CODES, static=True).judge(tree, p.float(), chances)
    return verdict_from_hits(tree, hit, residual.argmax(dim=-1))


def test_rejection_is_the_rule_that_runs() -> None:
    """Within five standard errors of Rejection's own mean over 400 draws, tree by tree pooled."""
    p, q = laws(1), laws(2)
    drafts, _, at = enumerate_trees(PAIRS, p, q)
    lengths = torch.stack([judged(drafts, p[at], seed).count - 1 for seed in range(400)]).double()
    gap = (lengths.mean(dim=0) - accepted(drafts, rejection(drafts))).mean()
    assert abs(float(gap)) < 5 * float(lengths.std()) / lengths.numel() ** 0.5


def test_what_was_not_drawn_is_passed_over() -> None:
    """An invalid child is as if it were not there."""
    p, q = laws(1), laws(2)
    drafts, _, _ = enumerate_trees(PAIRS, p, q)
    valid = drafts.valid.clone()
    valid[:, [2, 4, 5, 6]] = False
    cut = Sampled(PAIRS, drafts.codes, valid, drafts.p, drafts.q)
    stem = cut.first_path()
    for rule in RULES.values():
        torch.testing.assert_close(accepted(cut, rule(cut)), accepted(stem, rule(stem)))
