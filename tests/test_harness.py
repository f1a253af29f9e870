"""The harness of bench: whose turn it is, and what the rows of a result say."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from eval.comparison import beside_best, interval, leads, row, tau_interval
from eval.harness import SLICE, Configuration, interleaved, measure, portions
from eval.runs.measurements import Measured, Measurements
from tests.test_bench import image

CPU = torch.device("cpu")


@dataclass
class MadeClock:
    """The clock of a made device, which finishes half of every step only when it is waited for."""

    seconds: float = 0.0
    queued: float = 0.0

    def read(self) -> float:
        return self.seconds

    def synchronise(self, device: torch.device) -> None:
        self.seconds, self.queued = self.seconds + self.queued, 0.0


@dataclass
class MadeDecoder:
    """Commits one code in a step, which takes step_s seconds. An image takes two steps."""

    name: str
    step_s: float
    clock: MadeClock
    log: list[str]  # the names of decoders, one for each step

    def steps(self, requests: Iterable[Request]) -> Iterator[MadeStep]:
        for request in requests:
            for finished in ([], [image(request.name)]):
                self.clock.seconds += self.step_s / 2
                self.clock.queued += self.step_s / 2
                self.log.append(self.name)
                yield MadeStep(1, finished)


@dataclass
class MadeStep:
    committed: int
    finished: list[Decoded]


Decoders = dict[Configuration, MadeDecoder]


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    """Returns two decoders of one device, a fast one and a slow one."""
    clock, log = MadeClock(), list[str]()
    monkeypatch.setattr("eval.harness.time.perf_counter", clock.read)
    monkeypatch.setattr("eval.harness.synchronise", clock.synchronise)
    made = MadeDecoder("ar", 1.2 * SLICE, clock, log), MadeDecoder("eagle-2", 4 * SLICE, clock, log)
    return {Configuration(decoder.name, 1.0, 1): decoder for decoder in made}


def requests_of(*names: str) -> list[Request]:
    return [Request(name, None, 0) for name in names]


def test_the_configuration_that_is_behind_decodes_next(decoders: Decoders) -> None:
    """ar takes two steps in a turn, eagle-2 one. Both are charged for their own steps alone."""
    bar = tqdm(total=4, file=io.StringIO())
    measured = interleaved(decoders, requests_of("b", "a"), CPU, bar)
    (log,) = {id(decoder.log): decoder.log for decoder in decoders.values()}.values()
    assert log == ["ar", "ar", "eagle-2", "eagle-2", "ar", "ar", "eagle-2", "eagle-2"]
    assert bar.n == 4
    for item, decoder in decoders.items():
        assert [image.name for image in measured[item.name].images] == ["a", "b"]
        assert measured[item.name].seconds == pytest.approx(2 * decoder.step_s)


def test_warm_up_is_not_measured(decoders: Decoders, tmp_path: Path) -> None:
    """Nothing is decoded once all batches are stored."""
    requests = requests_of("0", "1")
    for steps in (6, 0):
        store = Measurements(tmp_path, "today", {}, {})
        results = measure(decoders, requests, store, 1, CPU)
        for item, decoder in decoders.items():
            images = [image.name for entry in results[item.name] for image in entry.images]
            assert images == ["0", "1"] and decoder.log.count(decoder.name) == steps
            assert [entry.seconds for entry in results[item.name]] == pytest.approx([2 * decoder.step_s] * 2)
        next(iter(decoders.values())).log.clear()


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


def test_auto_beside_the_size_that_is_fastest_on_the_other_half() -> None:
    """Batches hold 1, 1, 2 and 1 images. 16 nodes are fastest on batches 0 and 2, plain decoding on batches 1
    and 3. On batches 0 and 2 plain decoding takes fewer seconds per image, but more for all images."""
    seconds = {
        None: [1.0, 2.0, 4.0, 2.0],
        16: [3.0, 6.0, 2.5, 6.0],
        32: [4.0, 3.0, 4.0, 3.0],
        "auto": [1.5, 2.0, 1.5, 2.0],
    }
    items = {size: Configuration("self-draft" if size else "ar", 1.0, 8, size) for size in seconds}
    results = {
        items[size].name: [
            Measured(second, [image(str(n))] * (2 if n == 2 else 1)) for n, second in enumerate(values)
        ]
        for size, values in seconds.items()
    }
    (found,) = beside_best(items.values(), results)
    assert (found["method"], found["temperature"], found["batch_size"]) == ("self-draft", 1.0, 8)
    assert found["best"] == [16, "ar"] and found["speed_over_best"] == [3, 2]
    assert beside_best([items[None], items[16]], results) == []  # nothing is sized by cost
    assert beside_best([items[None], items["auto"]], results) == []  # there is no other size
    once = {name: entries[:1] for name, entries in results.items()}
    assert beside_best(items.values(), once) == []  # one batch has no other half


def test_portions_keep_slots_full() -> None:
    requests = [Request(str(n), None, n) for n in range(70)]
    assert [len(portion) for portion in portions(requests, 1)] == [1] * 70
    assert [len(portion) for portion in portions(requests, 4)] == [17, 18, 17, 18]
    assert [len(portion) for portion in portions(requests, 32)] == [70]
    assert sum(portions(requests, 4), []) == requests
