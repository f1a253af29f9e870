"""Quality formulas against scipy, torchmetrics and loops that follow the definitions word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.distance import cdist
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

from eval.metrics.distances import frechet, inception_score, kid, mmd, precision_recall


def sets(fake: int, real: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of correlated rows with other means and scales."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=rng, dtype=torch.float64)
    a = torch.randn(fake, width, generator=rng, dtype=torch.float64) @ mix
    b = 1.3 * torch.randn(real, width, generator=rng, dtype=torch.float64) @ mix.T + 0.4
    return a, b


class Given(nn.Module):
    """A feature network that returns what it is given, for torchmetrics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, rows: Tensor) -> Tensor:
        """Pictures [N, D, 1, 1] are rows [N, D]."""
        return rows.flatten(1)


def textbook(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance by scipy's root of the product of covariances."""
    s, t = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(s @ t).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(s) + np.trace(t) - 2 * np.trace(root))


@pytest.mark.parametrize("shape", [(60, 41, 8), (200, 90, 30)])
def test_frechet_is_the_textbook_one(shape: tuple[int, int, int]) -> None:
    a, b = sets(*shape)
    assert frechet(a, b) == pytest.approx(textbook(a.numpy(), b.numpy()), rel=1e-8)


def test_frechet_of_fewer_rows_than_features() -> None:
    """Singular covariances, where scipy's root goes through a small ridge and ours needs none."""
    a, b = sets(12, 9, 40)
    s, t = (torch.cov(x.T) + 1e-9 * torch.eye(40, dtype=torch.float64) for x in (a, b))
    root = scipy.linalg.sqrtm((s @ t).numpy()).real
    wanted = (a.mean(0) - b.mean(0)).square().sum() + s.trace() + t.trace() - 2 * np.trace(root)
    assert frechet(a, b) == pytest.approx(float(wanted), rel=1e-4)
    assert frechet(a, a.flip(0)) == pytest.approx(0, abs=1e-9)


def test_frechet_and_kid_are_those_of_torchmetrics() -> None:
    a, b = sets(80, 70, 10)
    fid = FrechetInceptionDistance(Given(10), normalize=False).set_dtype(torch.float64)
    fid.inception.eval()
    kernel = KernelInceptionDistance(Given(10), subsets=1, subset_size=70)
    for rows, real in ((a, False), (b, True)):
        fid.update(rows[:, :, None, None], real=real)
        kernel.update(rows[:70, :, None, None], real=real)
    assert frechet(a, b) == pytest.approx(float(fid.compute()), rel=1e-6)
    assert mmd(a[:70], b) == pytest.approx(float(kernel.compute()[0]), rel=1e-6)


def test_kid_is_unbiased_and_averages_subsets() -> None:
    a, b = sets(50, 60, 6)
    whole, spread = kid(a, b)
    assert whole == mmd(a, b) and spread == 0
    rng = torch.Generator().manual_seed(3)
    pairs = [[torch.randperm(n, generator=rng)[:20] for n in (50, 60)] for _ in range(7)]
    wanted = [mmd(a[i], b[j]) for i, j in pairs]
    assert kid(a, b, 7, 20, seed=3) == pytest.approx((np.mean(wanted), np.std(wanted)))
    draws = [torch.randn(2, 30, 4, generator=rng, dtype=torch.float64) for _ in range(200)]
    same = np.array([mmd(x, y) for x, y in draws])
    assert abs(same.mean()) < 4 * same.std() / math.sqrt(200), "one law: zero on average"
    diagonals = [sum(((x @ x.T / 4 + 1) ** 3).diagonal().mean() for x in pair) / 30 for pair in draws]
    biased = same + np.array(diagonals) - 2 / 30  # about what counting each row against itself adds
    assert abs(biased.mean()) > 4 * biased.std() / math.sqrt(200)


def test_inception_score() -> None:
    logits = 3 * torch.randn(90, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    metric = InceptionScore(Given(7), splits=1)
    metric.update(logits[:, :, None, None])
    assert inception_score(logits, 1)[0] == pytest.approx(float(metric.compute()[0]), rel=1e-6)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(5))
    laws = torch.softmax(logits[order], 1).numpy()
    parts = [laws[n : n + 30] for n in (0, 30, 60)]
    wanted = [np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()) for p in parts]
    assert inception_score(logits, 3, seed=5) == pytest.approx((np.mean(wanted), np.std(wanted)))
    certain = torch.eye(5).repeat(4, 1) * 1000
    assert inception_score(certain, 1)[0] == pytest.approx(5)


@pytest.mark.parametrize("k", [1, 3])
def test_precision_recall_by_the_definition(k: int) -> None:
    fake, real = sets(70, 50, 5)
    fake, real = (rows.numpy() for rows in (0.5 * fake, real))

    def radius(rows: np.ndarray) -> np.ndarray:
        return np.sort(cdist(rows, rows), axis=1)[:, k]

    def share(rows: np.ndarray, manifold: np.ndarray) -> float:
        return float((cdist(rows, manifold) < radius(manifold)).any(1).mean())

    got = precision_recall(torch.from_numpy(fake), torch.from_numpy(real), k)
    assert got == pytest.approx((share(fake, real), share(real, fake)))
    assert 0 < got[0] < 1 and 0 < got[1] < 1 and got[0] != got[1]


def test_the_border_of_a_ball_is_outside() -> None:
    real = torch.tensor([[0.0], [1.0], [3.0]])  # radii 1, 1, 2
    fake = torch.tensor([[-1.0], [5.0]])  # 1 and 2 from the nearest
    assert precision_recall(fake, real, 1)[0] == 0
    assert precision_recall(fake + 0.01, real, 1)[0] == 0.5


@pytest.mark.parametrize("rows", [torch.full((4, 3), math.nan), torch.zeros(1, 3), torch.zeros(4)])
def test_senseless_features_are_refused(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="rows are needed|not finite"):
        frechet(rows, torch.zeros(4, 3))
