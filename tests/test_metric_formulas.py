"""Scores of sets of features against a second library and what follows the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from eval.metrics.distances import frechet, inception_score, kid, precision_recall
from tests.metric_checkpoints import library


def sets(fake: int, real: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of correlated rows with other means and scales."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=rng, dtype=torch.float64)
    a = torch.randn(fake, width, generator=rng, dtype=torch.float64) @ mix
    b = 1.3 * torch.randn(real, width, generator=rng, dtype=torch.float64) @ mix.T + 0.4
    return a, b


@pytest.mark.parametrize(("fake", "real", "width"), [(60, 41, 8), (12, 9, 40)])
def test_frechet_is_the_textbook_one_and_torch_fidelitys(fake: int, real: int, width: int) -> None:
    """Of singular covariances too: the nuclear norm of the centred rows' products is the last trace."""
    a, b = sets(fake, real, width)
    x, y = ((rows - rows.mean(0)) / math.sqrt(len(rows) - 1) for rows in (a, b))
    spread = x.square().sum() + y.square().sum() - 2 * torch.linalg.matrix_norm(x @ y.T, "nuc")
    textbook = float((a.mean(0) - b.mean(0)).square().sum() + spread)
    assert frechet(a, b) == pytest.approx(textbook, rel=1e-7)
    source = library("torch_fidelity.metric_fid")
    statistics = [source.fid_features_to_statistics(rows) for rows in (a, b)]
    found = source.fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"]
    assert frechet(a, b) == pytest.approx(found, rel=1e-8 if width < fake else 1e-5)


def test_frechet_of_equal_sets() -> None:
    """Of fewer rows than features."""
    few, _ = sets(12, 9, 40)
    assert frechet(few, few.flip(0)) == pytest.approx(0, abs=1e-4)
    wide, _ = sets(64, 2, 1280)
    assert frechet(wide + 3, wide.flip(0) + 3) < 1e-8 * 2 * wide.var(0).sum()


def test_kid_is_torchmetrics_and_averages_subsets() -> None:
    a, b = sets(70, 70, 10)
    wanted = library("torchmetrics.image.kid").poly_mmd(a, b)
    assert kid(a, b) == (pytest.approx(float(wanted), rel=1e-9), 0)
    mean, spread = kid(a, b, 400, 20, seed=3)
    assert abs(mean - float(wanted)) < 0.5 * spread
    assert kid(a, b, 400, 20, seed=3) == (mean, spread) != kid(a, b, 400, 20, seed=4)


def test_inception_score() -> None:
    logits = 3 * torch.randn(90, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = np.random.RandomState(5).permutation(90)
    parts = torch.softmax(logits[order], 1).numpy().reshape(3, 30, 7)
    wanted = [np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()) for p in parts]
    assert inception_score(logits, 3, seed=5) == pytest.approx((np.mean(wanted), np.std(wanted)))


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


@pytest.mark.parametrize("rows", [torch.zeros(1, 3), torch.zeros(4)])
def test_too_few_features_are_refused(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="at least 2 are needed"):
        frechet(rows, torch.zeros(4, 3))
