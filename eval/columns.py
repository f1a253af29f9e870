"""The columns of bench: each says how it is measured and how it is shown. A new column is an entry of COLUMNS
and, if it needs a new measurement, a field of adt_tree.records.Step or Decoded, or of eval.quality.Quality.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from adt_tree.records import tau

if TYPE_CHECKING:
    from eval.harness import Configuration
    from eval.quality import Quality
    from storage.measurements import Measured

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
        texts: Mapping[str, str] | None = None,
        drafter_share: float = 0.0,
    ) -> None:
        """measured, baseline: one entry per batch of prompts. scores: of the images of all configurations.
        texts: the prompts by the names of images; None: every image has another one. drafter_share: what a
        pass of the model's drafter reads, over a pass of the target; 0 if it has none."""
        self.configuration, self.drafter_share = configuration, drafter_share
        names = (configuration.name, configuration.baseline)
        self.scores, self.scores_of_ar = ((scores or {}).get(name, ()) for name in names)
        self.seconds = np.array([entry.seconds for entry in measured])  # per image
        self.speed_up = np.array([entry.seconds for entry in baseline]) / self.seconds
        self.batch_s = self.seconds * [len(entry.images) for entry in measured]
        self.images = [image for entry in measured for image in entry.images]
        self.steps = [step for image in self.images for step in image.steps]
        self.expected = {image.name: image.codes for entry in baseline for image in entry.images}
        texts = texts or {}
        self.prompts = [texts.get(image.name, image.name) for image in self.images]

    def mean(self, name: str) -> float:
        """Returns the mean over images of an attribute of Decoded."""
        return sum(getattr(image, name) for image in self.images) / len(self.images)

    def same_image(self) -> float:
        """Returns the share of images whose codes are those of the AR baseline."""
        return sum(image.codes == self.expected[image.name] for image in self.images) / len(self.images)

    def projected(self) -> float:
        """Returns the speed-up where a pass takes the time of reading its weights, however many rows it has:
        tau / (1 + calls * c), with calls passes of the drafter per pass of the target, of which each reads
        the share c of the target's weights, in the model measured."""
        calls = self.mean("drafter_calls") / max(self.mean("target_calls"), 1)
        return tau(self.images) / (1 + calls * self.drafter_share)

    def nlls(self) -> np.ndarray:
        """Returns the mean -log p of the codes of each image."""
        return np.array([image.nll for image in self.scores])

    def nlls_over_ar(self) -> np.ndarray:
        """Returns how much that is above the AR baseline's, for the same prompt and seed."""
        return self.nlls() - np.array([image.nll for image in self.scores_of_ar])

    def recognised(self) -> np.ndarray:
        """Returns 1 for each recognised image, 0 for the others, NaN where the prompt names nothing known."""
        found = [np.nan if image.recognised is None else float(image.recognised) for image in self.scores]
        return np.array([] if np.isnan(found).all() else found)

    def by_prompt(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns the mean of the images' values for each prompt, without prompts whose values are NaN. The
        images of one prompt are not independent, but prompts are."""
        groups: dict[str, list[float]] = {}
        for prompt, value in zip(self.prompts, values, strict=True):
            if not np.isnan(value):
                groups.setdefault(prompt, []).append(value)
        return np.array([np.mean(group) for group in groups.values()])

    def mean_interval(self, values: np.ndarray) -> Interval:
        """Returns the bootstrap 95 % interval over prompts of the mean of the images' values."""
        return interval((self.by_prompt(values),), np.mean)

    def tau_interval(self) -> Interval:
        """Returns the 95 % interval of tau over prompts."""
        codes = [sum(step.accepted + 1 for step in image.steps) for image in self.images]
        calls = [max(len(image.steps), 1) for image in self.images]

        def ratio(codes: np.ndarray, calls: np.ndarray, axis: int) -> np.ndarray:
            return codes.sum(axis) / calls.sum(axis)

        return interval((self.by_prompt(codes), self.by_prompt(calls)), ratio)


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


def mean_column(key: str, heading: str, values: Callable[[Comparison], np.ndarray], form: str) -> Column:
    """Returns the optional column of the mean over images, with its interval over prompts."""

    def mean(comparison: Comparison) -> float | None:
        found = values(comparison)
        return float(np.nanmean(found)) if len(found) else None

    return Column(key, heading, mean, form, lambda c: c.mean_interval(values(c)), optional=True)


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
        mean_column("recognised", "recognised", Comparison.recognised, "{:.0%}"),
    )
}  # fmt: skip
LEGEND = """\
- **speed-up**: seconds of `ar` divided by the method's, the median over batches of prompts.
- **projected**: not measured: the speed-up if a pass over many nodes takes as long as over one, which is
  tau / (1 + calls x c). *calls* are the drafter's passes per pass of the model, and *c* is what one of them
  reads, over what the model reads.
- **tau**: codes per pass of the model (target call).
- **depth**, **drafted**: levels and nodes of a tree, on average. **calls**, **seconds**: per image.
- **= AR**: share of images that equal `ar`'s, code for code.
- **NLL**: mean of -log p per code under the guided model at temperature 1. **NLL - ar**: its mean difference
  from that of `ar` for the same prompt and seed. The row *ar, other seeds* shows what chance alone does.
- **recognised**: share of images, of those whose prompts name an original, whose nearest original has that
  name, by features of EfficientNet-Lite0 at 128 px.
- Intervals are bootstrap 95 % intervals over prompts, of speed-up over batches of prompts. A value that does
  not apply is left out."""


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
