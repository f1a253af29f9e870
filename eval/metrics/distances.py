"""The formulas of quality metrics, float64: every command's figures come from here.

Legend: N images a set, D features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

KID_DEGREE = 3  # of the kernel (x y / D + 1)^3
ROWS = 1024  # of a distance matrix at once


def frechet(fake: Tensor, real: Tensor) -> float:
    """Squared Wasserstein-2 distance of the Gaussians fitted to two sets, with covariances over N - 1.

    Heusel et al. 1706.08500. |m - m'|^2 + tr S + tr S' - 2 tr (S S')^1/2, the last trace as the nuclear norm
    of R R'^T where Q R factors a centred set over (N - 1)^1/2: no matrix root, and no covariance of rank
    N < D.
    fake [N, D], real [N', D]. ValueError for less than two rows or values that are not finite.
    """
    fake, real = _checked(fake, 2), _checked(real, 2)
    factors, spread = [], 0.0
    for rows in (fake, real):
        centred = (rows - rows.mean(0)) / (len(rows) - 1) ** 0.5
        spread += float(centred.square().sum())
        factors.append(torch.linalg.qr(centred, mode="r").R)
    cross = torch.linalg.matrix_norm(factors[0] @ factors[1].T, "nuc")
    return float((fake.mean(0) - real.mean(0)).square().sum() + spread - 2 * cross)


def mmd(fake: Tensor, real: Tensor) -> float:
    """Unbiased squared maximum mean discrepancy under the kernel (x y / D + 1)^3; may be negative.

    Binkowski et al. 1801.01401. fake [N, D], real [N', D], N and N' at least 2.
    """
    fake, real = _checked(fake, 2), _checked(real, 2)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** KID_DEGREE

    def within(a: Tensor) -> Tensor:
        table = kernel(a, a)
        return (table.sum() - table.diagonal().sum()) / (len(a) * (len(a) - 1))

    return float(within(fake) + within(real) - 2 * kernel(fake, real).mean())


def kid(
    fake: Tensor, real: Tensor, subsets: int = 100, size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Mean and standard deviation of mmd over random subsets of both sets.

    Sets of no more than size rows are taken whole, once: every subset would be the same. The generator,
    seeded by seed, draws the subset of fake, then of real.
    """
    if len(fake) <= size and len(real) <= size:
        return mmd(fake, real), 0.0
    rng = torch.Generator().manual_seed(seed)
    rows = [
        [torch.randperm(len(part), generator=rng)[:size] for part in (fake, real)] for _ in range(subsets)
    ]
    values = torch.tensor([mmd(fake[a], real[b]) for a, b in rows], dtype=torch.float64)
    return float(values.mean()), float(values.std(correction=0))


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """exp of the mean divergence of p(class | image) from its mean; mean and deviation over splits.

    Salimans et al. 1606.03498. logits [N, C], shuffled by seed, split evenly. ValueError if N < splits.
    """
    logits = _checked(logits, splits)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    scores = []
    for part in logits[order].tensor_split(splits):
        law = part.log_softmax(1)
        marginal = law.logsumexp(0) - torch.tensor(float(len(part)), dtype=torch.float64).log()
        scores.append((law.exp() * (law - marginal)).sum(1).mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))


def precision_recall(fake: Tensor, real: Tensor, k: int = 3) -> tuple[float, float]:
    """Share of fake rows inside the real manifold, and of real rows inside the fake one.

    Kynkaanniemi et al. 1904.06991. A set's manifold: balls round its rows, as wide as the distance to the
    k-th nearest other row; inside is strictly nearer. fake [N, D], real [N', D], more than k rows each.
    """
    fake, real = _checked(fake, k + 1), _checked(real, k + 1)

    def radii(rows: Tensor) -> Tensor:
        return torch.cat(
            [_distances(part, rows).kthvalue(k + 1, dim=1).values for part in rows.split(ROWS)]
        )  # the nearest of all is the row itself

    def share_inside(rows: Tensor, manifold: Tensor) -> float:
        wide = radii(manifold)
        inside = [(_distances(part, manifold) < wide).any(1) for part in rows.split(ROWS)]
        return float(torch.cat(inside).double().mean())

    return share_inside(fake, real), share_inside(real, fake)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distances [rows of a, rows of b]."""
    return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")


def _checked(rows: Tensor, least: int) -> Tensor:
    """The rows as float64. ValueError for too few of them, or values that are not finite."""
    if rows.ndim != 2 or len(rows) < least:
        raise ValueError(f"features of shape {list(rows.shape)}: at least {least} rows are needed")
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("the features are not finite: damaged weights or images")
    return rows.double()
