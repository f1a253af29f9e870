"""Scores of sets of features: the field's libraries, float64, on rows of any network.

Legend: N images a set, D features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adt_tree.errors import UserError
from eval.metrics.networks import library


def frechet(fake: Tensor, real: Tensor) -> float:
    """Squared Wasserstein-2 distance of the Gaussians fitted to two sets, covariances over N - 1.

    Heusel et al. 1706.08500, by torchmetrics. fake [N, D], real [N', D], at least two rows each.
    """
    fake, real = (checked(rows, 2) for rows in (fake, real))
    centre = real.mean(0)
    fake, real = fake - centre, real - centre
    if len(fake) + len(real) < len(centre):
        # The same distance in a basis of what the rows span: roots of D x D matrices of small rank are slow
        # and inexact (64 rows of 1280 features: 2.4 s and 3e-5 between equal sets; here .05 s and 2e-8).
        basis = torch.linalg.qr(torch.cat((fake, real)).T).Q
        fake, real = fake @ basis, real @ basis
    features = nn.Identity()  # torchmetrics' network: our rows are features already
    features.num_features = fake.shape[1]
    metric = library("torchmetrics.image.fid").FrechetInceptionDistance(feature=features)
    metric.update(fake, real=False)
    metric.update(real, real=True)
    return max(float(metric.compute()), 0.0)


def kid(
    fake: Tensor, real: Tensor, subsets: int = 100, size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Unbiased squared maximum mean discrepancy under the kernel (x y / D + 1)^3, which may be negative:
    mean and standard deviation over random subsets.

    Binkowski et al. 1801.01401, by torch-fidelity. fake [N, D], real [N', D]. Subsets have min(size, N, N')
    rows; where that is all of both sets there is one. seed: of the subsets.
    """
    fake, real = (checked(rows, 2) for rows in (fake, real))
    size = min(size, len(fake), len(real))
    found = library("torch_fidelity.metric_kid").kid_features_to_metric(
        fake,
        real,
        kid_subsets=1 if size == len(fake) == len(real) else subsets,
        kid_subset_size=size,
        rng_seed=seed,
        verbose=False,
    )
    return found["kernel_inception_distance_mean"], found["kernel_inception_distance_std"]


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """exp of the mean divergence of p(class | image) from its mean; mean and deviation over splits.

    Salimans et al. 1606.03498, by torch-fidelity. logits [N, C], shuffled by seed; UserError if N < splits.
    """
    score = library("torch_fidelity.metric_isc").isc_features_to_metric
    found = score(checked(logits, splits), splits, shuffle=True, rng_seed=seed)
    return found["inception_score_mean"], found["inception_score_std"]


def precision_recall(fake: Tensor, real: Tensor, k: int = 3) -> tuple[float, float]:
    """Share of fake rows inside the real manifold, and of real rows inside the fake one.

    Kynkaanniemi et al. 1904.06991, by torch-fidelity. A set's manifold: balls round its rows, as wide as the
    distance to the k-th nearest other row. fake [N, D], real [N', D], more than k rows each.
    """
    share = library("torch_fidelity.metric_prc").calculate_precision_recall_part
    return share(checked(fake, k + 1), checked(real, k + 1), neighborhood=k, batch_size=1024)


def checked(rows: Tensor, least: int) -> Tensor:
    """The rows as float64. UserError for too few of them."""
    if rows.ndim != 2 or len(rows) < least:
        raise UserError(f"features of {len(rows)} images: at least {least} are needed")
    return rows.double()
