"""The rivals follow the target's distribution, and broken variants of every method must fail this test.

tests.test_engine checks the rest: at temperature 0 they make the AR baseline's images, and a seed gives one
image whatever else is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.engine import build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.noise import Noise
from adt_tree.policy import TreeShape, windowed
from adt_tree.rivals.jacobi_window import JacobiWindow, Judged, readers, sample
from adt_tree.rivals.sjd_coupled import couple
from adt_tree.rivals.sjd_pac import product_tree
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import DraftTree, Topology, rows_at
from adt_tree.verify import Rejection, Verdict
from tests.decoding import chain
from tests.tabular import CODES, TabularModel, deviation, image_distribution, requests, table
from tests.test_distribution import FILTERED, GUIDED, LIMIT, KeepsDraft, KeepsRejected
from tests.test_engine import WINDOWS as SHAPES

LENGTH = 5
LOGITS = table(1, LENGTH)


def score(name: str, sampling: Sampling = GUIDED, cells: str = "random", images: int = 4096) -> float:
    """Returns the distance of images from the exact distribution."""
    method = Method(name, sampling, SHAPES[name], seed_cells=cells)
    decoder = build(TabularModel(LOGITS, LOGITS, Grid(1, LENGTH)), method, 256, 0)
    exact = image_distribution(LOGITS[: sampling.branches], sampling, LENGTH)
    return abs(deviation(decoder.decode(requests(images)), exact))


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
    monkeypatch.setattr("adt_tree.rivals.jacobi_window.JacobiWindow", kind)
    assert score(name, images=2560) > LIMIT


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
    """The two commit equal numbers of codes in every step. tests.test_engine checks that the images are the
    AR baseline's."""
    sampling = Sampling(guidance=1.0)
    method = Method("sjd-gumbel", sampling, TreeShape(3, 1, 3), seed_cells="left")
    decoder = build(TabularModel(LOGITS, LOGITS, Grid(1, LENGTH)), method, 8, 0)
    log_p, noise = log_probs(LOGITS[:1], sampling.as_tensors(LOGITS)), Noise(CODES, silent=False)
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
