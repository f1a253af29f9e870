"""The harness of bench: whose turn it is, and what the rows of a result say."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from eval.columns import Comparison, row
from eval.harness import SLICE, Configuration, interleaved, measure, portions
from storage.measurements import Measured, Measurements
from tests.eval.test_bench import image

CPU = torch.device("cpu")


@dataclass
class SimulatedClock:
    """The clock of a simulated device, which finishes half of every step only when it is waited for."""

    seconds: float = 0.0
    queued: float = 0.0

    def read(self) -> float:
        return self.seconds

    def synchronise(self, device: torch.device) -> None:
        self.seconds, self.queued = self.seconds + self.queued, 0.0


@dataclass
class FakeDecoder:
    """Commits one code in a step, which takes step_s seconds. An image takes two steps."""

    name: str
    step_s: float
    clock: SimulatedClock
    log: list[str]  # the names of decoders, one for each step

    def steps(self, requests: Iterable[Request]) -> Iterator[FakeStep]:
        for request in requests:
            for finished in ([], [image(request.name)]):
                self.clock.seconds += self.step_s / 2
                self.clock.queued += self.step_s / 2
                self.log.append(self.name)
                yield FakeStep(1, finished)


@dataclass
class FakeStep:
    committed: int
    finished: list[Decoded]


Decoders = dict[Configuration, FakeDecoder]


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    """Returns two decoders of one device, a fast one and a slow one."""
    clock, log = SimulatedClock(), list[str]()
    monkeypatch.setattr("eval.harness.time.perf_counter", clock.read)
    monkeypatch.setattr("eval.harness.synchronise", clock.synchronise)
    made = FakeDecoder("ar", 1.2 * SLICE, clock, log), FakeDecoder("eagle-2", 4 * SLICE, clock, log)
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
        store = Measurements(tmp_path, {})
        store.start({})
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
    configuration = Configuration("adt-tree", 1.0, 1, 8, (("adt_beta", 0.3),))
    summary = row(Comparison(configuration, measured, baseline, drafter_share=0.2))
    assert summary["SR"] == 2 and summary["SR_95"] == [1, 3] and summary["median_s"] == 1
    assert summary["images_per_min"] == 30 and summary["same_image"] == 0.6667
    assert summary["step_ms"] == 0.125
    assert summary["projected"] == pytest.approx(2 / (1 + 1.5 * 0.2), abs=1e-4)
    assert (summary["total_token"], summary["varied"]) == (8, {"adt_beta": 0.3})
    assert json.loads(json.dumps(summary)) == summary


def test_the_interval_of_tau_weighs_images_by_their_steps() -> None:
    """One image has two steps of four codes, another eight steps of one code."""
    decoded = [
        Decoded(name, 0, [], [Step(0, 0, 0, 4, 1, 4, accepted, 1.0)] * steps, target_calls=steps)
        for name, accepted, steps in (("a", 3, 2), ("b", 0, 8))
    ]
    measured = [Measured(1.0, [one]) for one in decoded]
    comparison = Comparison(Configuration("self-draft", 1.0, 1), measured, measured)
    assert (row(comparison)["tau"], comparison.tau_interval()) == (1.6, (1, 4))
    comparison = Comparison(Configuration("self-draft", 1.0, 1), measured[:1], measured[:1])
    assert comparison.tau_interval() == (4, 4)


def test_images_of_one_prompt_count_as_one() -> None:
    """Four images of two prompts: the interval is that of two values, and of one prompt it has no width."""
    measured = [Measured(1.0, [image(name)]) for name in ("a", "b", "a.1", "b.1")]
    values = np.array([1.0, 5.0, 3.0, 7.0])
    texts = {"a": "cat", "a.1": "cat", "b": "dog", "b.1": "dog"}
    two = Comparison(Configuration("ar", 1.0, 1), measured, measured, texts=texts)
    assert list(two.by_prompt(values)) == [2, 6] and two.mean_interval(values) == (2, 6)
    one = Comparison(Configuration("ar", 1.0, 1), measured, measured, texts=dict.fromkeys(texts, "cat"))
    assert one.mean_interval(values) == (4, 4)
    assert list(two.by_prompt(np.array([1.0, np.nan, 3.0, np.nan]))) == [2]


def test_portions_keep_slots_full() -> None:
    requests = [Request(str(n), None, n) for n in range(70)]
    assert [len(portion) for portion in portions(requests, 1)] == [1] * 70
    assert [len(portion) for portion in portions(requests, 4)] == [17, 18, 17, 18]
    assert [len(portion) for portion in portions(requests, 32)] == [70]
    assert sum(portions(requests, 4), []) == requests
