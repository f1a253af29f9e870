"""bench and sweep keep what they measured: interrupted runs go on, other configurations are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import main
from adt_tree.records import Decoded, Step
from eval.errors import UserError
from eval.measurements import Key, Measured, Measurements

Run = Callable[..., tuple[int, str, str]]
BENCH = "--arms eagle2 floor --temperatures 1 --num_images 3 --depth 2 --warmup 1".split()
SWEEP = "--betas 0.5 --step_depths 1 --step_widths 0 1 --num_images 2 --warmup 0".split()
KEYS: list[Key] = [("ar", 1.0), ("adt", 1.0)]
FIGURES = ("SR", "SR_95", "median_s")  # of clocks


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path) -> Run:
    """bench or sweep on the tiny checkpoint into tmp_path / o: (status, stdout, stderr)."""

    def call(command: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        fixed = ["--model_path", str(tiny_checkpoint), "--precision", "fp32"]
        status = main.main([command, *fixed, "--output_dir", str(tmp_path / "o"), *words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def stop_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Interrupt the measurement that follows `count` kept ones, in the middle of its line."""
    add = Measurements.add

    def stopping(store: Measurements, names: list[str], key: Key, measured: Measured) -> None:
        if store.added == count:
            with store.path.open("a") as stream:
                stream.write('{"run": 1, "started": "20')
            raise KeyboardInterrupt
        add(store, names, key, measured)

    patch.setattr(Measurements, "add", stopping)


def rows(folder: Path) -> list[tuple[int, str, str]]:
    """(run, prompt, arm) of every kept measurement."""
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    return [(row["run"], *row["prompts"], row["arm"]) for row in map(json.loads, lines)]


def lasting(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What no clock decides."""
    return [{k: v for k, v in row.items() if k not in FIGURES} for row in result["results"]]


def test_an_interrupted_bench_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "o"
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        status, out, err = run("bench", *BENCH)
    assert (status, out) == (130, "") and "the same command" in err and len(err.splitlines()) == 1
    status, out, err = run("bench", *BENCH, "--profile")
    assert (status, err) == (0, "") and "Assembled from 2 runs" in out
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((folder / "bench.json").read_text())
    assert [part["measurements"] for part in result["runs"]] == [3, 6] and len(result["profile"]) == 3
    kept = rows(folder)
    assert [row[0] for row in kept] == [1] * 3 + [2] * 6
    prompts = [row[1] for row in kept]  # the second prompt, whose arms were not complete, was measured anew
    assert all(len({*prompts[i : i + 3]}) == 1 for i in (0, 3, 6)) and len(set(prompts)) == 3
    assert [row[2] for row in kept] == ["ar", "eagle2", "floor"] + ["eagle2", "floor", "ar"] + [
        "floor", "ar", "eagle2"
    ]  # fmt: skip
    monkeypatch.setattr("eval.measure._timed", None)
    again = json.loads(run("bench", *BENCH)[1].splitlines()[-1])
    assert again["results"] == result["results"] and again["runs"] == result["runs"]


def test_a_resumed_bench_is_an_uninterrupted_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*BENCH, "--batch_size", "2", "--reference", "transformers"]
    whole = json.loads(run("bench", *words)[1].splitlines()[-1])
    assert len(whole["runs"]) == 1 and whole["runs"][0]["measurements"] == 8
    (tmp_path / "o").rename(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert run("bench", *words)[0] == 130
    parts = json.loads(run("bench", *words)[1].splitlines()[-1])
    assert len(parts["runs"]) == 2 and lasting(parts) == lasting(whole)


def test_another_configuration_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*BENCH, "--num_images", "1", "--warmup", "0"]
    assert run("bench", *words)[0] == 0
    before = (tmp_path / "o" / "measurements.jsonl").read_bytes()
    for change, says in (("--cfg 2", "cfg = 3.0, now it is 2.0"), ("--arms ar eagle2", "arms"),
                         ("--prompt cat", "prompt = None, now it is 'cat'")):  # fmt: skip
        status, out, err = run("bench", *words, *change.split())
        assert (status, out) == (2, "") and says in err and len(err.splitlines()) == 1
    monkeypatch.setattr("eval.session._git", lambda *words: "fffffff")
    status, _, err = run("bench", *words)
    assert status == 2 and ("commit" in err or "changes" in err) and "choose another folder" in err
    assert (tmp_path / "o" / "measurements.jsonl").read_bytes() == before
    status, _, err = run("sweep", *SWEEP)
    assert status == 2 and "choose another folder" in err


def test_an_interrupted_sweep_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert run("sweep", *SWEEP)[0] == 130
    status, out, err = run("sweep", *SWEEP, "--top", "1")
    assert (status, err) == (0, "") and len(rows(tmp_path / "o")) == 8
    stored = json.loads((tmp_path / "o" / "sweep.json").read_text())
    assert [part["measurements"] for part in stored["runs"]] == [4, 4]
    assert json.loads(out.splitlines()[-1])["runs"] == stored["runs"]


def opened(root: Path, settings: dict[str, Any] | None = None) -> Measurements:
    """The measurements of a folder, two arms."""
    store = Measurements(root, KEYS, "today")
    store.open(settings or {"cfg": 3.0}, {"output_dir": str(root)})
    return store


def measured(name: str) -> Measured:
    """An image of two codes."""
    return Measured(0.25, [Decoded(name, 7, [1, 2], [Step(1, 0, 1, 2, 3, 6, 1, 0.125)], 0.5, 2, 3)])


def test_measurements_come_back_as_they_were(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.finished(["0"]) is None and store.runs() == []
    for key in KEYS:
        store.add(["0"], key, measured("0"))
    store.add(["1"], KEYS[0], measured("1"))
    again = opened(tmp_path)
    assert again.finished(["0"]) == {key: measured("0") for key in KEYS}
    assert again.finished(["1"]) is None and again.added == 0
    assert again.runs() == [{"started": "today", "measurements": 2}]
    assert len((tmp_path / "measurements.jsonl").read_text().splitlines()) == 2


def test_a_batch_is_never_put_together_from_two_runs(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(["0"], KEYS[0], measured("0"))
    line = json.loads(store.path.read_text())
    with store.path.open("a") as stream:
        stream.write(json.dumps({**line, "run": 2, "arm": "adt"}) + "\n")
    assert opened(tmp_path).finished(["0"]) is None


def test_damage_is_refused_but_for_a_torn_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for key in KEYS:
        store.add(["0"], key, measured("0"))
    whole = store.path.read_text()
    store.path.write_text(whole + whole.splitlines()[0])
    assert opened(tmp_path).finished(["0"]) and store.path.read_text() == whole
    store.path.write_text(whole.replace('"run"', "run", 1))
    with pytest.raises(UserError, match=r"measurements\.jsonl, line 1, is damaged"):
        opened(tmp_path)
    for bad in ("[]\n", "{}\n", '{"run": 1}\n', "\n"):
        store.path.write_text(whole + bad)
        with pytest.raises(UserError, match="line 3, is damaged"):
            opened(tmp_path)
    store.path.write_text(whole)
    with pytest.raises(UserError, match=r"measurements made with cfg = 3\.0, now it is 2"):
        opened(tmp_path, {"cfg": 2})
    (tmp_path / "measurement_configs.json").unlink()
    with pytest.raises(UserError, match="another configuration"):
        opened(tmp_path, {"cfg": 2})
