"""The rows of a result of bench: every configuration beside the AR baseline, self-drafting beside the best
rival, and trees sized by cost beside the best other size or plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from adt_tree.method import METHODS
from adt_tree.records import Decoded, size_shares, tau
from eval.harness import BASELINE, Configuration, Results
from eval.runs.measurements import Measured

RESAMPLES = 10_000  # random samples of the bootstrap
OURS = "self-draft"
RIVALS = tuple(name for name, spec in METHODS.items() if spec.rival)


def rows(configurations: Iterable[Configuration], results: Results) -> list[dict[str, Any]]:
    """Returns a row per configuration, compared with the AR baseline of its temperature and batch size."""
    return [row(item, results[item.name], results[item.baseline]) for item in configurations]


def row(
    configuration: Configuration, measured: Sequence[Measured], baseline: Sequence[Measured]
) -> dict[str, Any]:
    """Returns one row of the result.

    SR, the speed-up, is the median over batches of prompts of the baseline's seconds divided by the
    configuration's, both of the same run.
    """
    seconds = np.array([entry.seconds for entry in measured])
    ratios = np.array([entry.seconds for entry in baseline]) / seconds
    images = [image for entry in measured for image in entry.images]
    expected = {image.name: image.codes for entry in baseline for image in entry.images}
    steps = [step for image in images for step in image.steps]
    count, calls = len(images), sum(image.target_calls for image in images)
    total = sum(entry.seconds * len(entry.images) for entry in measured)
    return {
        "method": configuration.method,
        "temperature": configuration.temperature,
        "batch_size": configuration.batch_size,
        "total_token": configuration.total_token,
        "varied": dict(configuration.varied),
        "exact": configuration.exact,
        "SR": round(float(np.median(ratios)), 3),
        "SR_95": [round(bound, 3) for bound in interval(ratios)],
        "tau": round(tau(images), 3),
        "tau_95": [round(bound, 3) for bound in tau_interval(images)],
        "mean_depth": round(sum(image.mean_depth for image in images) / count, 3),
        "mean_nodes": round(sum(image.mean_nodes for image in images) / count, 2),
        "tree_sizes": size_shares(image.tree_sizes for image in images),
        "target_calls": round(calls / count, 2),
        "drafter_calls": round(sum(image.drafter_calls for image in images) / count, 2),
        "step_ms": round(float(np.median([step.ms for step in steps])), 3),
        "median_s": round(float(np.median(seconds)), 4),
        "images_per_min": round(60 * count / total, 2),
        "images": count,
        "same_image": round(sum(image.codes == expected[image.name] for image in images) / count, 3),
    }


def leads(configurations: Iterable[Configuration], results: Results) -> list[dict[str, Any]]:
    """Returns how far self-drafting is ahead of the best rival in tau, for every temperature, batch size and
    tree size at which both were measured. The better of several variants counts on either side."""
    groups: dict[tuple[Any, ...], dict[bool, list[tuple[float, Configuration, list[Decoded]]]]] = {}
    for item in configurations:
        name = item.method.partition(":")[0]
        if name not in (OURS, *RIVALS):
            continue
        images = [image for entry in results[item.name] for image in entry.images]
        group = groups.setdefault((item.temperature, item.batch_size, item.total_token), {})
        group.setdefault(name == OURS, []).append((tau(images), item, images))
    answer = []
    for (temperature, batch_size, total_token), group in groups.items():
        if len(group) < 2:
            continue
        ours, rival = (max(group[side], key=lambda entry: entry[0]) for side in (True, False))
        answer.append(
            {
                "temperature": temperature,
                "batch_size": batch_size,
                "total_token": total_token,
                "method": " ".join([ours[1].method, *map(str, dict(ours[1].varied).values())]),
                "rival": " ".join([rival[1].method, *map(str, dict(rival[1].varied).values())]),
                "tau": [round(ours[0], 3), round(rival[0], 3)],
                "lead_95": [round(bound, 3) for bound in tau_interval(ours[2], rival[2])],
            }
        )
    return answer


def beside_best(configurations: Iterable[Configuration], results: Results) -> list[dict[str, Any]]:
    """Returns how fast trees sized by cost (--total_token auto) are beside the fastest other size of the same
    method and options, or plain decoding if that is faster. A method without another size is left out.

    The fastest size is chosen on one half of the batches of prompts and compared on the other half, because
    the fastest of several owes a part of its lead to noise. "best" names the fastest on the batches 0, 2, 4,
    ... and then that on the batches 1, 3, 5, ...; "speed_over_best" has for each of the two its seconds
    divided by those of `auto` on the batches that did not choose it. Above 1, `auto` is faster.
    """
    groups: dict[tuple[Any, ...], dict[int | str | None, np.ndarray]] = {}
    for item in configurations:
        key = (item.method, item.temperature, item.batch_size, item.varied)
        total = [entry.seconds * len(entry.images) for entry in results[item.name]]
        groups.setdefault(key, {})[item.total_token] = np.array(total)
    answer = []
    for (method, temperature, batch_size, varied), sizes in groups.items():
        auto = sizes.pop("auto", None)
        if auto is None or not sizes or len(auto) < 2:
            continue
        sizes[BASELINE] = groups[BASELINE, temperature, batch_size, ()][None]
        best, ratios = [], []
        for first in (0, 1):
            chosen = min(sizes, key=lambda size: sizes[size][first::2].sum())
            best.append(chosen)
            other = slice(1 - first, None, 2)
            ratios.append(round(float(sizes[chosen][other].sum() / auto[other].sum()), 3))
        answer.append(
            {
                "method": " ".join([method, *map(str, dict(varied).values())]),
                "temperature": temperature,
                "batch_size": batch_size,
                "best": best,
                "speed_over_best": ratios,
            }
        )
    return answer


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Returns a bootstrap 95 % interval of the median."""
    return percentiles(np.median(ratios[resamples(len(ratios))], axis=1))


def tau_interval(images: Sequence[Decoded], rival: Sequence[Decoded] | None = None) -> tuple[float, float]:
    """Returns a bootstrap 95 % interval of tau over images, or of its lead over a rival's images of the same
    names, which are resampled in pairs."""
    picks = resamples(len(images))

    def resampled(these: Sequence[Decoded]) -> np.ndarray:
        codes, calls = counts(sorted(these, key=lambda image: image.name))
        return codes[picks].sum(axis=1) / np.maximum(calls[picks].sum(axis=1), 1)

    return percentiles(resampled(images) - (0.0 if rival is None else resampled(rival)))


def counts(images: Sequence[Decoded]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes that the steps of each image committed, and its target calls."""
    codes = [sum(step.accepted + 1 for step in image.steps) for image in images]
    return np.array(codes), np.array([image.target_calls for image in images])


def resamples(count: int) -> np.ndarray:
    """Returns the indices [RESAMPLES, count] of random samples of `count` items with replacement. They are
    the same at every call."""
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Returns the bounds of the middle 95 %."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
