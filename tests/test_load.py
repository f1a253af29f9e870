"""load_test: its plan of requests, what it counts and compares, and what it refuses."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from eval import load_tables
from serve.load import IMAGE, REFUSED, Call, Outcome, Process, growth, plan, summary
from serve.settings import Settings
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run
from tests.service import Running

CALL = Call("red heart", 7, "ar", 1.0, 3.0, False)
SETTINGS = Settings(slots=2)  # of the fixture `live`


def test_a_plan_mixes_all_settings_equally() -> None:
    calls = plan(["a", "b", "c"], ["ar", "self-draft"], [0.0, 1.0], [3.0], 40, 0.2, 1)
    counts = Counter((call.method, call.temperature) for call in calls)
    assert set(counts.values()) == {10} and len(counts) == 4
    assert sum(call.cancel for call in calls) == 8 and len({call.seed for call in calls}) == 40
    assert calls == plan(["a", "b", "c"], ["ar", "self-draft"], [0.0, 1.0], [3.0], 40, 0.2, 1)
    assert calls != plan(["a", "b", "c"], ["ar", "self-draft"], [0.0, 1.0], [3.0], 40, 0.2, 2)


def test_figures_are_of_finished_images() -> None:
    images = [Outcome(CALL, IMAGE, float(n), 2.0 * n) for n in range(1, 4)]
    figures = summary([*images, Outcome(CALL, REFUSED)], 30.0)
    assert (figures["images"], figures["refused"], figures["images_per_min"]) == (3, 1, 6)
    assert (figures["first_p50"], figures["image_p50"]) == (2, 4)


def test_a_service_that_grows_is_a_fault() -> None:
    before = Process(rss=1000, files=9, threads=4)
    assert growth(before, replace(before, rss=1050)) == []
    for name, value in {"rss": 1051, "files": 10, "threads": 5}.items():
        (line,) = growth(before, replace(before, **{name: value}))
        assert name in line and str(value) in line


def test_images_are_those_made_offline(
    live: Running, checkpoints: Checkpoints, tmp_path: Path, run: Run
) -> None:
    words = ["load_test", "--url", live.site, "--requests", "8", "--concurrency", "4", "--cancelled", "0.25"]
    words += ["--methods", "self-draft", "ar", "--temperatures", "0", "1", "--output_dir", tmp_path]
    status, out, err = run(*words, "--compare", checkpoints["emoji"].path)
    result = json.loads(out.splitlines()[-1])
    assert (status, result["faults"]) == (0, []), err
    assert (result["images"], result["compared"], result["failed"]) == (6, 6, 0)
    status, out, _ = run(*words, "--compare", "emoji")  # another model gives other images
    assert status == 1 and len(json.loads(out.splitlines()[-1])["faults"]) == 6
    (first, second) = load_tables.read(tmp_path / "load.json")
    assert first["images"] == second["images"] == 6
    table = load_tables.text_of([first, second])
    assert "| self-draft, ar | 2 | 8 | 4 clients | 3 | 6 | 0 |" in table
    assert "2 requests were cancelled. 6 images were compared with those of Pipeline, 0 differ." in table
    assert "6 images were compared with those of Pipeline, 6 differ." in table


def test_a_stored_test_says_what_it_watched(live: Running, tmp_path: Path, run: Run) -> None:
    """The watched process is this one. Its memory may grow, so the test does not read the status."""
    words = ["load_test", "--url", live.site, *"--requests 4 --concurrency 2 --partial_images 0".split()]
    result = json.loads(run(*words, "--pid", os.getpid(), "--output_dir", tmp_path)[1].splitlines()[-1])
    assert result["images"] == 4 and result["first_p99"] == result["image_p99"]  # no picture before the last
    (before, after) = result["held"]
    assert before["rss"] > 10**7 and before["threads"] >= 3 and before["files"] >= 3
    text = load_tables.text_of(load_tables.read(tmp_path / "load.json"))
    assert f"{after['rss'] / 1e6:.0f} MB, {after['files']} files" in text


def test_a_name_with_the_suffix_asks_for_lantern(
    live: Running, checkpoints: Checkpoints, tmp_path: Path, run: Run
) -> None:
    name = "self-draft-lantern"
    fields = replace(CALL, method=name).fields
    assert (fields["method"], fields["lantern"], CALL.fields["lantern"]) == ("self-draft", True, False)
    words = ["load_test", "--url", live.site, *"--requests 4 --concurrency 2 --methods".split(), name]
    words += ["--compare", checkpoints["emoji"].path, "--output_dir", tmp_path]
    status, out, err = run(*words)
    result = json.loads(out.splitlines()[-1])
    assert (status, result["faults"], result["compared"], result["methods"]) == (0, [], 4, [name]), err


@pytest.mark.parametrize("name", ["self-draft", "self-draft-lantern"])
def test_generate_images_is_timed_beside_it(name: str, tmp_path: Path, run: Run) -> None:
    words = ["load_test", "--offline", "2", "--requests", "2", "--output_dir", tmp_path]
    status, out, err = run(*words, "--methods", name)
    assert status == 0, err
    assert f"| {name} | 2 | 2 | generate_images | 0 | 2 | - |" in out


def test_refusals(refused: Refused, tmp_path: Path) -> None:
    assert "--url http://example.org" in refused("load_test", "--url", "http://example.org")
    assert "--cancelled 0.5" in refused("load_test", "--cancelled", "0.5", "--partial_images", "0")
    for words in ("--methods ar self-draft", "--temperatures 0 1", "--guidances 1 3", "--rate 2.0",
                  "--pid 1", "--cancelled 0.5", "--compare emoji"):  # fmt: skip
        line = refused("load_test", "--offline", "2", *words.split())
        assert "--offline" in line and words.split()[0] in line
    folder = ("--output_dir", tmp_path)
    assert "127.0.0.1:1" in refused("load_test", "--url", "http://127.0.0.1:1", "--requests", "1", *folder)
