"""Scores of sets of features by torch-fidelity, in float64.

Shapes: N images in a set, D features, C classes. Raises UserError if a set has too few images for a score.

torch_fidelity.calculate_metrics is not used: it feeds its networks 8-bit images, whereas clean-fid does not
round pixels, and it stores features only as pickles.
"""

from __future__ import annotations

from torch import Tensor

from adt_tree.errors import UserError
from eval.metrics.networks import library


def frechet(fake: Tensor, real: Tensor) -> float:
    """Returns the squared Wasserstein-2 distance between Gaussians fitted to fake [N, D] and real [N', D].

    Heusel et al. 1706.08500, with covariances over N - 1. Equal sets give 0 up to rounding: 1e-6 of the
    features' variance, above or below.
    """
    metric = library("torch_fidelity.metric_fid")
    statistics = [metric.fid_features_to_statistics(checked(rows, 2)) for rows in (fake, real)]
    return metric.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]


def kid(fake: Tensor, real: Tensor, subsets: int, size: int, seed: int) -> tuple[float, float]:
    """Returns the Kernel Inception Distance of fake [N, D] and real [N', D]: mean and deviation over subsets.

    Binkowski et al. 1801.01401: the unbiased squared maximum mean discrepancy under the kernel
    (x y / D + 1)^3. It may be negative. seed chooses the rows of the subsets, min(size, N, N') each.
    """
    fake, real = checked(fake, 2), checked(real, 2)
    scores = library("torch_fidelity.metric_kid").kid_features_to_metric(
        fake,
        real,
        kid_subsets=subsets,
        kid_subset_size=min(size, len(fake), len(real)),
        rng_seed=seed % 2**32,  # numpy takes no other
        verbose=False,
    )
    return scores["kernel_inception_distance_mean"], scores["kernel_inception_distance_std"]


def inception_score(logits: Tensor, splits: int, seed: int) -> tuple[float, float]:
    """Returns the Inception Score of logits [N, C]: mean and standard deviation over splits.

    Salimans et al. 1606.03498: exp of the mean divergence of p(class | image) from p(class). seed shuffles
    the images before they are split.
    """
    metric = library("torch_fidelity.metric_isc")
    logits, seed = checked(logits, splits), seed % 2**32
    scores = metric.isc_features_to_metric(logits, splits, shuffle=True, rng_seed=seed)
    return scores["inception_score_mean"], scores["inception_score_std"]


def precision_recall(fake: Tensor, real: Tensor, k: int) -> tuple[float, float]:
    """Returns the share of fake images inside the real manifold, and of real images inside the fake one.

    Kynkaanniemi et al. 1904.06991. A set's manifold is the union of balls around its features that reach
    to the k-th nearest other feature. fake [N, D], real [N', D], more than k rows each.
    """
    metric = library("torch_fidelity.metric_prc")
    fake, real = checked(fake, k + 1), checked(real, k + 1)
    return metric.calculate_precision_recall_part(fake, real, neighborhood=k, batch_size=1024)


def checked(rows: Tensor, minimum: int) -> Tensor:
    """Returns the rows in float64. Raises UserError if there are fewer than `minimum`."""
    if rows.ndim != 2 or len(rows) < minimum:
        raise UserError(f"features of {len(rows)} images: at least {minimum} are needed")
    return rows.double()
