"""The lossless rivals follow the target's distribution, and broken variants of each must fail this test. The
relaxed ones accept drafts as often as an enumeration says.

test_engine checks the rest: at temperature 0 they make the AR baseline's images, and a seed gives one
image whatever else is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.engine import build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.noise import ACCEPT, Noise, uniform
from adt_tree.policy import TreeShape
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree, Topology, rows_at
from adt_tree.verify import Rejection, Verdict
from lab.rivals.cool_sd import Annealed, weights_of
from lab.rivals.gsd import GroupJudge
from lab.rivals.jacobi_window import JacobiWindow, Judge, Judged, readers, sample
from lab.rivals.sjd_sv import RunJudge
from lab.rivals.windows import couple, product_tree
from lab.settings import Annealing, Groups, Runs
from lab.shapes import windowed
from tests.adt_tree.test_distribution import FILTERED, GUIDED, IMAGES, LIMIT, KeepsDraft, KeepsRejected
from tests.adt_tree.test_engine import WINDOWS as SHAPES
from tests.support.decoding import chain
from tests.support.methods import RELAXED
from tests.support.tabular import CODES, TabularModel, deviation, image_distribution, requests, table

LENGTH = 5
LOGITS = table(1, LENGTH)


def score(name: str, sampling: Sampling = GUIDED, cells: str = "random") -> float:
    """Returns the distance of images from the exact distribution."""
    method = Method(name, sampling, SHAPES[name], seed_cells=cells)
    decoder = build(TabularModel(LOGITS, LOGITS, Grid(1, LENGTH)), method, 256, 0)
    exact = image_distribution(LOGITS[: sampling.branches], sampling, LENGTH)
    return abs(deviation(decoder.decode(requests(IMAGES)), exact))


@pytest.mark.parametrize(("sampling", "cells"), [(GUIDED, "random"), (FILTERED, "left"), (GUIDED, "above")])
@pytest.mark.parametrize("name", SHAPES)
def test_distribution(name: str, sampling: Sampling, cells: str) -> None:
    assert score(name, sampling, cells) < LIMIT


class KeepsResidual(JacobiWindow):
    """Broken: the residual still contains the rejected code."""

    rejection_kind = KeepsRejected

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.judge = self.rejection_kind(CODES, static=True).judge


class KeepsQ(KeepsResidual):
    """Broken: the next candidate is judged as if the ones before it could be sampled again."""

    rejection_kind = KeepsDraft


class EarlierQ(JacobiWindow):
    """Broken as the released code of 2510.24211 is: a code that stays in the window is judged by the q of the
    pass that sampled it, not by that of the last pass."""

    def _advance(self, tree: DraftTree, verdict: Verdict, codes: Tensor, q: Tensor, first: Tensor) -> None:
        before, old = self.codes[..., 0].clone(), self.q.clone()
        super()._advance(tree, verdict, codes, q, first)
        at = (verdict.count[:, None] + self._offsets).clamp(max=len(self._offsets))
        same = F.pad(before, (0, 1), value=-1).gather(1, at) == self.codes[..., 0]
        self.q[:, :-1] = torch.where(same[..., None], rows_at(old, at), self.q[:, :-1])


class NeighbourQ(JacobiWindow):
    """Broken: a code is judged by the q of the next position."""

    def _advance(self, tree: DraftTree, verdict: Verdict, codes: Tensor, q: Tensor, first: Tensor) -> None:
        super()._advance(tree, verdict, codes, q.roll(-1, dims=1), first)


CONTROLS = [
    ("sjd", KeepsResidual), ("sjd-coupled", KeepsResidual), ("sjd-pac", KeepsResidual), ("sjd-pac", KeepsQ),
    ("sjd", NeighbourQ), ("sjd-coupled", EarlierQ), ("sjd-pac", EarlierQ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CONTROLS)
def test_control(name: str, kind: type[JacobiWindow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.rivals.jacobi_window.JacobiWindow", kind)
    assert score(name) > LIMIT


def test_sampling_is_by_inversion() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0, 3.0]] * 3])
    assert sample(p, torch.tensor([[1e-9, 0.25, 1 - 1e-12]], dtype=torch.float64)).tolist() == [[1, 3, 3]]


def test_a_coupled_code_stays_with_the_greatest_probability() -> None:
    """X follows q. Over many uniforms the coupled code X' follows p, and equals X with probability 1 - TV(p,
    q) = 0.7, the greatest possible."""
    count, q, p = 40000, torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    noise, seeds = Noise(3, silent=False, stream=7), torch.arange(count)
    x = (q.log() + noise.gumbel(seeds, torch.zeros(count, 1, dtype=torch.int64))[:, 0]).argmax(dim=1)
    tree = replace(chain(torch.stack((torch.zeros_like(x), x), dim=1)), q=q.expand(count, 2, 3))
    everywhere = p.expand(count, 2, 3)
    chances = torch.rand(2, count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hit, left = Rejection(3, static=True).judge(tree, everywhere, chances[0].float())
    after = couple(Judged(tree, everywhere, hit, sample(left, chances[1]), chances[1]))[:, 0]
    share = torch.bincount(after, minlength=3) / count
    assert torch.allclose(share, p, atol=0.01)
    assert float((after == x).float().mean()) == pytest.approx(0.7, abs=0.01)


def naive_jacobi(image: list[int], length: int, choose: Callable[[list[int]], int]) -> list[int]:
    """Returns the codes that each pass of a Gumbel-coupled window commits, by the definition: every position
    is chosen behind all drafts before it. A position that no pass has scored repeats the code before it."""
    done, window, committed = image[:1], [image[0]] * length, []
    while len(done) < len(image):
        drafts = window[: len(image) - len(done) - 1]
        choices = [choose(done + drafts[:n]) for n in range(len(drafts) + 1)]
        count = 1 + next((n for n, code in enumerate(drafts) if code != choices[n]), len(drafts))
        done, window = done + choices[:count], choices[count:]
        window += [(done + window)[-1]] * (length - len(window))
        committed.append(count)
    return committed


def test_the_gumbel_window_is_jacobi_iteration() -> None:
    """The two commit equal numbers of codes in every step. test_engine checks that the images are the
    AR baseline's."""
    sampling = Sampling(guidance=1.0)
    method = Method("sjd-gumbel", sampling, TreeShape(3, 1, 3), seed_cells="left")
    decoder = build(TabularModel(LOGITS, LOGITS, Grid(1, LENGTH)), method, 8, 0)
    log_p, noise = (
        log_probs(LOGITS[:1], PassSampling.uniform(sampling, LOGITS.device)),
        Noise(CODES, silent=False),
    )
    rates = set()
    for image in decoder.decode(requests(64)):
        gumbel = noise.gumbel(torch.tensor([image.seed]), torch.arange(LENGTH)[None])[0]

        def choose(prefix: list[int], gumbel: Tensor = gumbel) -> int:
            state = 0
            for code in prefix:
                state = state * CODES + 1 + code
            return int((log_p[state] + gumbel[len(prefix)]).argmax())

        steps = [step.accepted + 1 for step in image.steps]
        assert steps == naive_jacobi(image.codes, 3, choose)
        rates.update(steps)
    assert rates == {1, 2, 3, 4}


def test_the_window_of_pac_is_a_tree_and_a_chain() -> None:
    """As published, there are 64 nodes with the root, and 1 + 4 + 16 of them form the tree."""
    shape = METHODS["sjd-pac"].tree
    tree = Topology(product_tree(shape))
    assert shape == TreeShape(45, 4, 63) and len(tree.parents) == 64 and tree.width == 4
    assert [tree.depths.count(depth) for depth in range(5)] == [1, 4, 16, 1, 1] and tree.depth == 45
    assert [windowed(budget, 4).depth for budget in (1, 5, 20, 31)] == [1, 2, 2, 13]
    assert [*map(len, product_tree(TreeShape(9, 3, 4)))] == [1, 2, 3, 4]
    small = Topology(product_tree(TreeShape(3, 2, 7)))  # levels: nodes 1, 2; nodes 3 to 6; node 7, below 3
    assert small.parents == [0, 0, 0, 1, 1, 2, 2, 3]
    rows = readers(small)
    assert rows[0] == [0, 1, 3, 7] and rows[2][2:] == [5, 7] and rows[4][3:] == [7]


# The relaxed rivals. Without relaxation each is an exact method, code for code. With it, the probability that
# it accepts drafts is that of an enumeration over 16 codes.

WIDE, UNIFORMS = 16, 4000
OFF = {
    "gsd": ("sjd", Groups(gsd_group=1)),
    "sjd-sv": ("sjd", Runs(sv_run=1)),
    "cool-sjd": ("sjd", Annealing(1.0, 0.0)),
    "cool-sd": ("eagle-1", Annealing(1.0, 0.0)),
}


def exact_of(method: Method) -> Method:
    """Returns the exact method from which a relaxed rival differs by its rule."""
    verify = "rejection" if method.spec.network else "coupled"
    return replace(method, name=OFF[method.name][0], relaxed=None, verify=verify)


def codes_and_calls(method: Method) -> list[tuple[list[int], int]]:
    """Returns the codes and target calls of images from the tables."""
    decoder = build(TabularModel(LOGITS, table(2, LENGTH), Grid(1, LENGTH)), method, 64, 0)
    return [(image.codes, image.target_calls) for image in decoder.decode(requests(256))]


@pytest.mark.parametrize("sampling", [GUIDED, FILTERED, Sampling(temperature=0.0)])
@pytest.mark.parametrize("name", OFF)
def test_without_relaxation_a_rival_is_the_exact_method(name: str, sampling: Sampling) -> None:
    relaxed = Method(name, sampling, RELAXED[name], relaxed=OFF[name][1])
    assert codes_and_calls(relaxed) == codes_and_calls(exact_of(relaxed))


STRONG = {
    "gsd": Groups(4, 1.0, 99.0),
    "sjd-sv": Runs(0.5),
    "cool-sjd": Annealing(3.0),
    "cool-sd": Annealing(3.0),
}


@pytest.mark.parametrize("name", RELAXED)
def test_relaxation_accepts_more_drafts_and_changes_images(name: str) -> None:
    """No relaxed rival is called exact, also at temperature 0."""
    for temperature in (0.0, 1.0):
        assert not Method(name, Sampling(temperature), RELAXED[name]).exact
    relaxed = Method(name, GUIDED, RELAXED[name], relaxed=STRONG[name])
    images, exact = codes_and_calls(relaxed), codes_and_calls(exact_of(relaxed))
    assert sum(calls for _, calls in images) < 0.95 * sum(calls for _, calls in exact)
    assert sum(a == b for (a, _), (b, _) in zip(images, exact, strict=True)) < len(images) / 2


def distributions(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns random p and q, both [count, WIDE]."""
    logits = torch.randn(2, count, WIDE, generator=torch.Generator().manual_seed(seed))
    p, q = (1.5 * logits).softmax(dim=-1)
    return p, q


def shares(judge: Judge, codes: list[int], p: Tensor, q: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns how often a judge accepts the first 0, 1, ... drafts of a chain, [L + 1], over random uniforms.
    Checks what every rejection leaves.

    codes: the drafts. p, q [L, WIDE]: their distributions. weights [L]: those of cool-sd.
    """
    tree = chain(torch.tensor([0, *codes]).expand(UNIFORMS, -1))
    rows = [torch.cat((x, x[:1])).expand(UNIFORMS, -1, -1) for x in (p, q)]
    chances = uniform(torch.arange(UNIFORMS), torch.ones(UNIFORMS, 1).long(), len(codes) + 1, ACCEPT)[:, 0]
    hit, left = judge(replace(tree, q=rows[1]), rows[0], chances.float())
    rejected = ~hit[:, 1:]
    residual = (p - (q if weights is None else torch.minimum(q, weights[:, None] * p))).clamp(min=0)
    residual = (residual / residual.sum(dim=-1, keepdim=True)).expand(UNIFORMS, -1, -1)
    torch.testing.assert_close(left[:, :-1][rejected], residual[rejected])
    accepted = hit[:, 1:].long().cumprod(dim=1).sum(dim=1)
    return torch.bincount(accepted, minlength=len(codes) + 1) / UNIFORMS


def group_chance(groups: Groups, p: Tensor, q: Tensor, x: int, rows: Tensor) -> float:
    """Returns the probability that gsd accepts x, by the definition."""
    order = sorted(range(WIDE), key=lambda code: float(p[code]))
    first = order.index(x) - groups.gsd_group // 2
    members = [order[rank] for rank in range(first, first + groups.gsd_group) if 0 <= rank < WIDE]
    assert groups.gsd_distance is not None
    near = [
        code
        for code in members
        if code == x
        or (
            abs(p[code] - p[x]) < groups.gsd_gap
            and (rows[code] - rows[x]).square().sum() < groups.gsd_distance
        )
    ]
    return min(1.0, float(sum(p[code] for code in near) / sum(q[code] for code in near)))


ROWS = torch.randn(WIDE, 3, generator=torch.Generator().manual_seed(9))
GROUPS = [
    Groups(1, 1.0, 99.0),
    Groups(2, 1.0, 99.0),
    Groups(5, 0.15, 99.0),
    Groups(14, 1.0, 6.0),
    Groups(6, 0.1, 6.0),
]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_group_is_accepted_as_enumerated(groups: Groups) -> None:
    """The plain rule, and one whose groups are one code larger, fail this test."""
    p, q = distributions(0, 1)
    judge, far = GroupJudge(groups, ROWS, Rejection(WIDE, static=True).judge), [0.0, 0.0]
    for x in range(WIDE):
        measured = float(shares(judge, [x], p, q)[1])
        assert measured == pytest.approx(group_chance(groups, p[0], q[0], x, ROWS), abs=0.03)
        for number, other in enumerate(
            (Groups(1, 1.0, 99.0), replace(groups, gsd_group=groups.gsd_group + 1))
        ):
            far[number] = max(far[number], abs(measured - group_chance(other, p[0], q[0], x, ROWS)))
    assert groups.gsd_group == 1 or min(far) > 0.05


def run_shares(runs: Runs, p: list[float], ratios: list[float], redraw: bool = False) -> list[float]:
    """Returns the probabilities that sjd-sv accepts the first 0, 1, ... drafts, by the definition.

    p, ratios: p_i and p_i / q_i of every draft. redraw: broken; every attempt has a uniform of its own.
    """
    shares, reached, begin = [0.0] * (len(p) + 1), 1.0, 0
    while begin < len(p):
        end = begin
        while end + 1 < len(p) and p[end + 1] >= p[end] and end - begin + 1 < (runs.sv_run or len(p)):
            end += 1
        enough = runs.sv_mass * sum(p[begin : end + 1])
        tail = max(n for n in range(begin, end + 1) if sum(p[n : end + 1]) >= enough)
        failed = 1.0  # the probability that all longer attempts have failed
        for last in range(end, tail - 1, -1):
            chance = min(1.0, math.prod(ratios[tail : last + 1]))
            still_failed = failed * (1 - chance) if redraw else min(failed, 1 - chance)
            shares[last + 1] += reached * (failed - still_failed)
            failed = still_failed
        shares[begin] += reached * failed
        reached, shares[end + 1] = shares[end + 1], 0.0
        begin = end + 1
    shares[len(p)] = reached
    return shares


@pytest.mark.parametrize(
    "runs", [Runs(), Runs(sv_mass=0.7), Runs(sv_mass=1.0), Runs(sv_run=2), Runs(sv_run=1)], ids=str
)
def test_a_run_is_accepted_as_enumerated(runs: Runs) -> None:
    """The plain rule, and one that draws a uniform for every attempt, fail this test."""
    judge, far = RunJudge(runs, Rejection(WIDE, static=True).judge), [0.0, 0.0]
    for seed in range(12):
        p, q = distributions(seed, 5)
        codes = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed))
        of_codes, ratios = (x.gather(1, codes)[:, 0].tolist() for x in (p, p / q))
        measured = shares(judge, codes[:, 0].tolist(), p, q)
        assert measured.tolist() == pytest.approx(run_shares(runs, of_codes, ratios), abs=0.03)
        for number, broken in enumerate(
            (run_shares(Runs(sv_run=1), of_codes, ratios), run_shares(runs, of_codes, ratios, True))
        ):
            far[number] = max(far[number], float((measured - torch.tensor(broken)).abs().max()))
    assert runs.sv_run == 1 or min(far) > 0.05


@pytest.mark.parametrize("annealing", [Annealing(), Annealing(2.0, 0.2), Annealing(0.5, 0.0)], ids=str)
def test_a_draft_is_accepted_by_its_weight(annealing: Annealing) -> None:
    """The plain rule fails this test."""
    weights, far = weights_of(annealing, 5), 0.0
    assert float(weights.mean()) == pytest.approx(annealing.cool_delta)
    judge = Annealed(WIDE, weights).judge
    for seed in range(8):
        p, q = distributions(seed, 5)
        codes = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed))
        ratios = (p / q).gather(1, codes)[:, 0]
        reached, plain = (F.pad((w * ratios).clamp(max=1).cumprod(0), (1, 0), value=1) for w in (weights, 1))
        measured = shares(judge, codes[:, 0].tolist(), p, q, weights)
        expected = reached - F.pad(reached[1:], (0, 1))
        torch.testing.assert_close(measured, expected, atol=0.03, rtol=0)
        far = max(far, float((measured - (plain - F.pad(plain[1:], (0, 1)))).abs().max()))
    assert far > 0.05


def test_the_weights_of_the_paper_tighten_the_end_of_a_window() -> None:
    assert [*map(round, (100 * weights_of(Annealing(), 5)).tolist())] == [285, 142, 70, 35, 17]
    assert float(weights_of(Annealing(), 15)[3]) > 1 > float(weights_of(Annealing(), 15)[4])
