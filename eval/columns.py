"""The columns of bench: each says how it is measured and how it is shown. A new column is an entry of COLUMNS
and, if it needs a new measurement, a field of adt_tree.records.Step or Decoded, or of eval.quality.Quality.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from adt_tree.records import tau

if TYPE_CHECKING:
    from eval.harness import Configuration
    from eval.quality import Quality
    from storage.measurements import Measured

PROJECTED = "anole"  # the family whose dimensions the projected speed-up is for
Row = Mapping[str, Any]  # of a stored result, by the columns' keys
Interval = tuple[float, float]


class Comparison:
    """The measurements of a configuration beside those of its AR baseline, which decoded the same prompts."""

    def __init__(
        self,
        configuration: Configuration,
        measured: Sequence[Measured],
        baseline: Sequence[Measured],
        scores: Mapping[str, Sequence[Quality]] | None = None,
    ) -> None:
        """measured, baseline: one entry per batch of prompts. scores: of the images of all configurations."""
        self.configuration = configuration
        names = (configuration.name, configuration.baseline)
        self.scores, self.scores_of_ar = ((scores or {}).get(name, ()) for name in names)
        self.seconds = np.array([entry.seconds for entry in measured])  # per image
        self.speed_up = np.array([entry.seconds for entry in baseline]) / self.seconds
        self.batch_s = self.seconds * [len(entry.images) for entry in measured]
        self.images = [image for entry in measured for image in entry.images]
        self.steps = [step for image in self.images for step in image.steps]
        self.expected = {image.name: image.codes for entry in baseline for image in entry.images}

    def mean(self, name: str) -> float:
        """Returns the mean over images of an attribute of Decoded."""
        return sum(getattr(image, name) for image in self.images) / len(self.images)

    def same_image(self) -> float:
        """Returns the share of images whose codes are those of the AR baseline."""
        return sum(image.codes == self.expected[image.name] for image in self.images) / len(self.images)

    def projected(self) -> float:
        """Returns the speed-up where a pass takes the time of reading its weights, however many rows it has:
        tau / (1 + calls * c), with calls passes of the drafter per pass of the target, of which each reads
        the share c of the target's weights."""
        calls = self.mean("drafter_calls") / max(self.mean("target_calls"), 1)
        return tau(self.images) / (1 + calls * drafter_share())

    def nlls(self) -> np.ndarray:
        """Returns the mean -log p of the codes of each image."""
        return np.array([image.nll for image in self.scores])

    def nlls_over_ar(self) -> np.ndarray:
        """Returns how much that is above the AR baseline's, for the same prompt and seed."""
        return self.nlls() - np.array([image.nll for image in self.scores_of_ar])

    def recognised(self) -> np.ndarray:
        """Returns 1 for each recognised image and 0 for the others whose prompts name anything known."""
        return np.array([float(image.recognised) for image in self.scores if image.recognised is not None])

    def same_codes(self) -> np.ndarray:
        """Returns the share of each image's codes that are those of the AR baseline. Empty for methods with
        other random numbers, which agree by chance; how often, the AR baseline at other seeds shows."""
        shared = self.configuration.shares_noise or self.configuration == self.configuration.other_seeds
        images = self.images if self.scores and shared else ()
        return np.array([np.mean(np.equal(image.codes, self.expected[image.name])) for image in images])

    def tau_interval(self) -> Interval:
        """Returns the 95 % interval of tau over images."""
        codes = np.array([sum(step.accepted + 1 for step in image.steps) for image in self.images])
        calls = np.array([max(len(image.steps), 1) for image in self.images])

        def ratio(codes: np.ndarray, calls: np.ndarray, axis: int) -> np.ndarray:
            return codes.sum(axis) / calls.sum(axis)

        return interval((codes, calls), ratio)


def over_images(values: np.ndarray) -> Interval:
    """Returns the bootstrap 95 % interval of the mean of values of images."""
    return interval((values,), np.mean)


def over_shares(values: np.ndarray) -> Interval:
    """Returns Wilson's 95 % interval of a share of images. values: 1 or 0 for each."""
    from scipy.stats import binomtest

    found = binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


@cache
def drafter_share() -> float:
    """Returns c of the projected speed-up: what a pass of PROJECTED's drafter reads, over a target's pass."""
    from models import footprint  # imports torch

    return footprint.drafter_share(footprint.published_dimensions(PROJECTED))


def interval(samples: tuple[np.ndarray, ...], statistic: Callable[..., Any]) -> Interval:
    """Returns the bootstrap 95 % interval of a statistic over paired samples; for a single sample, whose
    statistic is x, (x, x)."""
    from scipy.stats import bootstrap  # Importing it takes a second, for which --help must not wait.

    if len(samples[0]) < 2:
        value = float(statistic(*samples, axis=0))
        return value, value
    low, high = bootstrap(samples, statistic, paired=True, method="percentile", rng=0).confidence_interval
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of bench's table and the key of its rows."""

    key: str
    heading: str  # "" for a value that is stored and not shown
    measure: Callable[[Comparison], Any]
    form: str = "{}"  # format of a value
    interval: Callable[[Comparison], Interval] | None = None  # 95 %, stored as KEY_95
    timed: bool = False  # means nothing if the machine did other work (bench --untimed)
    optional: bool = False  # rows without a measurement leave it out

    def text(self, row: Row, intervals: bool = True) -> str:
        """Returns the cell of a row: the value, with its interval unless its width is 0; "-" for none."""
        if row.get(self.key) is None:
            return "-"
        text = self.form.format(row[self.key])
        ends = row.get(f"{self.key}_95")
        if not intervals or ends is None:
            return text
        low, high = (self.form.format(end) for end in ends)
        return text if ends[0] == ends[1] else f"{text} ({low}{' to ' if low[0] in '+-' else '-'}{high})"


def mean_column(
    key: str,
    heading: str,
    values: Callable[[Comparison], np.ndarray],
    form: str,
    ends: Callable[[np.ndarray], Interval] = over_images,
) -> Column:
    """Returns the optional column of the mean of several values, with the interval `ends` of that mean."""

    def mean(comparison: Comparison) -> float | None:
        found = values(comparison)
        return float(found.mean()) if len(found) else None

    return Column(key, heading, mean, form, lambda c: ends(values(c)), optional=True)


SETTINGS = ("method", "temperature", "total_token", "batch_size")  # the columns that tell rows apart
COLUMNS = {
    column.key: column
    for column in (
        Column("method", "method", lambda c: c.configuration.method),
        Column("temperature", "T", lambda c: c.configuration.temperature, "{:g}"),
        Column("total_token", "nodes", lambda c: c.configuration.total_token),
        Column("batch_size", "images in flight", lambda c: c.configuration.batch_size),
        Column("varied", "", lambda c: dict(c.configuration.varied)),
        Column("exact", "", lambda c: c.configuration.exact),
        Column("SR", "speed-up", lambda c: np.median(c.speed_up), "{:.2f}",
               lambda c: interval((c.speed_up,), np.median), timed=True),
        Column("projected", "projected", Comparison.projected, "{:.2f}"),
        Column("tau", "tau", lambda c: tau(c.images), "{:.2f}", Comparison.tau_interval),
        Column("mean_depth", "depth", lambda c: c.mean("mean_depth"), "{:.2f}"),
        Column("mean_nodes", "drafted", lambda c: c.mean("mean_nodes"), "{:.1f}"),
        Column("target_calls", "target calls", lambda c: c.mean("target_calls"), "{:.1f}"),
        Column("drafter_calls", "drafter calls", lambda c: c.mean("drafter_calls"), "{:.1f}"),
        Column("step_ms", "ms per step", lambda c: np.median([step.ms for step in c.steps]), "{:.2f}",
               timed=True),
        Column("median_s", "seconds", lambda c: np.median(c.seconds), "{:.2f}", timed=True),
        Column("images_per_min", "images/min", lambda c: 60 * len(c.images) / c.batch_s.sum(), "{:.1f}",
               timed=True),
        Column("images", "", lambda c: len(c.images)),
        Column("same_image", "= AR", Comparison.same_image, "{:.0%}"),
        mean_column("nll", "NLL", Comparison.nlls, "{:.3f}"),
        mean_column("nll_over_ar", "NLL - ar", Comparison.nlls_over_ar, "{:+.3f}"),
        mean_column("recognised", "recognised", Comparison.recognised, "{:.0%}", over_shares),
        mean_column("same_codes", "codes = AR", Comparison.same_codes, "{:.0%}"),
    )
}  # fmt: skip
LEGEND = (
    "speed-up: seconds of the AR baseline divided by the method's, median over batches of prompts with "
    "its bootstrap 95 % interval, which needs several batches; projected: not measured, the speed-up if a "
    "pass with many nodes takes as long as with one, tau / (1 + calls x c), with the drafter's passes per "
    "target pass and what one of them reads over what a target pass reads, at Anole's size; tau: codes "
    "per target call, with its interval over images; depth, drafted: levels and nodes of a tree, on "
    "average; calls and seconds: per image; = AR: share of images equal to the AR baseline's, code for "
    "code. With --quality, ar is measured at other seeds too (row ar, other seeds): the floor of NLL, "
    "recognised and codes = AR, where it shows agreement by chance. NLL: mean of -log p per code under "
    "the guided model at temperature 1, with its interval over images, taken as independent; NLL - ar: "
    "mean over images of its difference from that of ar for the same prompt and seed; recognised: share, "
    "of images whose prompts name an original, whose nearest original by features of EfficientNet-Lite0 "
    "at 128 px has that name; codes = AR: share of codes, for methods that share ar's random numbers. A "
    "value that does not apply is left out."
)


def row(comparison: Comparison) -> dict[str, Any]:
    """Returns a row of a stored result. Numbers are rounded to four digits behind the point."""
    values: dict[str, Any] = {}
    for column in COLUMNS.values():
        value = column.measure(comparison)
        if value is None and column.optional:
            continue
        values[column.key] = round(float(value), 4) if isinstance(value, float) else value
        if column.interval is not None:
            values[f"{column.key}_95"] = [round(bound, 4) for bound in column.interval(comparison)]
    return values
