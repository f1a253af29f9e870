"""The harness of bench: whose turn it is, and what the rows of a result say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from tqdm import tqdm

from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from eval.baseline import Image
from eval.comparison import beside_best, interval, leads, row, tau_interval
from eval.harness import SLICE, Configuration, interleaved, turns
from eval.runs.measurements import Measured
from tests.test_bench import image

CPU = torch.device("cpu")


@dataclass
class MadeDecoder:
    """Takes step_s seconds of a made clock for a step, and two steps for an image."""

    name: str
    step_s: float
    clock: list[float]  # its only entry is the time
    log: list[str] = field(default_factory=list)  # the names of decoders, one for each step

    def steps(self, requests: Iterable[Request]) -> Iterator[Image]:
        for request in requests:
            for finished in ([], [image(request.name)]):
                self.clock[0] += self.step_s
                self.log.append(self.name)
                yield Image(finished)


def test_configurations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decodes for SLICE seconds or for one step, and is charged for its own steps alone."""
    clock, log = [0.0], list[str]()
    monkeypatch.setattr("eval.harness.time.perf_counter", lambda: clock[0])
    speeds = {"ar": 0.6 * SLICE, "eagle-2": 2 * SLICE}
    decoders = {Configuration(n, 1.0, 1): MadeDecoder(n, s, clock, log) for n, s in speeds.items()}
    requests = [Request(name, None, 0) for name in ("b", "a")]
    with tqdm(disable=True) as bar:
        measured = interleaved(decoders, requests, CPU, bar)
    assert log == ["ar", "ar", "eagle-2", "ar", "ar", "eagle-2", "eagle-2", "eagle-2"]
    for entry, (name, step_s) in zip(measured.values(), speeds.items(), strict=True):
        assert [item.name for item in entry.images] == ["a", "b"], name
        assert entry.seconds == pytest.approx(2 * step_s)


def test_a_row() -> None:
    """Speed is the median over batches of prompts; same_image is the share of images that equal the
    baseline's."""
    baseline = [Measured(s, [image(n)]) for n, s in (("0", 2.0), ("1", 3.0), ("2", 4.0))]
    measured = [Measured(1.0, [image("0")]), Measured(1.0, [image("1", (1, 3))]), Measured(4.0, [image("2")])]
    summary = row(Configuration("adt-tree", 1.0, 1, 8, (("adt_beta", 0.3),)), measured, baseline)
    assert summary["SR"] == 2 and summary["SR_95"] == [1, 3] and summary["median_s"] == 1
    assert summary["images_per_min"] == 30 and summary["same_image"] == 0.667 and summary["step_ms"] == 0.125
    assert (summary["total_token"], summary["varied"]) == (8, {"adt_beta": 0.3})
    assert interval(torch.ones(5).numpy()) == (1, 1)


def test_intervals_of_tau() -> None:
    """tau is the number of codes per step. The interval of a lead resamples pairs of images with the same
    name."""

    def decoded(name: str, *accepted: int) -> Decoded:
        steps = [Step(n, 0, 0, 4, 1, 4, count, 1.0) for n, count in enumerate(accepted)]
        return Decoded(name, 0, [], steps, target_calls=len(steps))

    ours = [decoded("a", 3, 3), decoded("b", 1, 1)]
    assert tau_interval(ours) == (2, 4) and tau_interval(ours[:1]) == (4, 4)
    rival = [decoded("b", 0, 0), decoded("a", 2, 2)]
    assert tau_interval(ours, rival) == (1, 1)
    items = [Configuration(name, 1.0, 1, 16) for name in ("ar", "self-draft", "sjd", "sjd-pac")]
    entries = ([], ours, rival, [decoded("a", 0), decoded("b", 0)])
    results = {item.name: [Measured(1.0, images)] for item, images in zip(items, entries, strict=True)}
    (lead,) = leads(items, results)
    assert (lead["method"], lead["rival"], lead["tau"]) == ("self-draft", "sjd", [3, 2])
    assert lead["lead_95"] == [1, 1] and leads(items[:2], results) == []


def test_auto_beside_the_size_that_is_best_on_the_other_half() -> None:
    """16 nodes are best on batches 0 and 2, plain decoding on batches 1 and 3."""
    seconds = {
        None: (4.0, 2.0, 4.0, 2.0),
        16: (1.0, 6.0, 1.0, 6.0),
        32: (3.0, 3.0, 3.0, 3.0),
        "auto": (2.0,) * 4,
    }
    items = {size: Configuration("self-draft" if size else "ar", 1.0, 8, size) for size in seconds}
    results = {
        items[size].name: [Measured(s, [image(str(n))]) for n, s in enumerate(values)]
        for size, values in seconds.items()
    }
    (found,) = beside_best(items.values(), results)
    assert (found["method"], found["temperature"], found["batch_size"]) == ("self-draft", 1.0, 8)
    assert found["best"] == [16, "ar"] and found["to_best"] == [3, 2]
    assert beside_best([items[None], items[16]], results) == []  # nothing is sized by cost
    halves = {name: entries[:1] for name, entries in results.items()}
    assert beside_best(items.values(), halves) == []  # one batch has no other half


def test_portions_keep_slots_full() -> None:
    requests = [Request(str(n), None, n) for n in range(70)]
    assert [len(portion) for portion in turns(requests, 1)] == [1] * 70
    assert [len(portion) for portion in turns(requests, 4)] == [17, 18, 17, 18]
    assert [len(portion) for portion in turns(requests, 32)] == [70]
    assert sum(turns(requests, 4), []) == requests
