"""gpu_check on a CPU: its parts with their processes replaced, and what it says of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adt_tree import Pipeline
from cli.gpu_check import PARTS
from eval import gpu_check
from eval.gpu_check import Part
from eval.profile import memory
from eval.tables import STORED
from models.checkpoint.files import write_json
from storage.process import environment
from tests.conftest import Run

GB = 10**9


def bench(
    method: str = "self-draft", same: float = 1.0, precision: str = "fp32", **more: Any
) -> dict[str, Any]:
    """Returns a document of bench with one row."""
    row = {"method": method, "exact": True, "step_ms": 8.25, "tau": 3.0, "SR": 2.5, "images": 2}
    return {
        "part": "anole", "command": "python main.py bench", "options": {"model": "anole"},
        "environment": {"precision": precision}, "rows": [row | {"same_image": same}], **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (bench(), []),
        (bench(same=0.5), ["other codes", "50%"]),
        (bench(same=0.5, precision="bf16"), []),
        (bench(memory={"peak_bytes": 12 * GB, "estimate_bytes": 10 * GB}), []),
        (bench(memory={"peak_bytes": 13 * GB, "estimate_bytes": 10 * GB}), ["more memory", "13.00", "10.00"]),
        ({"command": "x", "failed": "ended with status 1"}, ["failed", "status 1"]),
        (
            {"command": "x", "tests": {"passed": 1, "skipped": 0, "failed": ["test_a"]}},
            ["test failed", "test_a"],
        ),
    ],
)
def test_only_what_is_wrong_on_any_gpu_is_judged(result: dict[str, Any], words: list[str]) -> None:
    lines = gpu_check.wrong([result])
    assert len(lines) == bool(words) and all(word in line for line in lines for word in words)


def test_a_check_prints_its_rows_and_ends_with_their_document(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = {
        "anole": bench(same=0.0),
        "tests": {"command": "x", "tests": {"passed": 3, "skipped": 1, "failed": []}},
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run", lambda part, *_: results[part.name])
    status, out, _ = run("gpu_check", "tests", "--output_dir", str(tmp_path))
    assert status == 0 and json.loads(out.splitlines()[-1])["tests"]["passed"] == 3
    status, out, _ = run("gpu_check", "anole", "--output_dir", str(tmp_path))
    *text, last = out.splitlines()
    assert status == 1 and "8.25" in out and text[-1] in json.loads(last)["wrong"]


def test_a_part_is_a_process(tmp_path: Path) -> None:
    """Its last line is its result; a status and a time limit are named. A finished part is not run again."""
    print_line = 'print("table"); print(\'{"rows": []}\')'

    def run(part: Part, seconds: float = 60) -> dict[str, Any]:
        return gpu_check.run(part, tmp_path, seconds, "cpu")

    assert run(Part("emoji", ("-c", print_line)))["rows"] == []
    assert "status 3" in run(Part("emoji", ("-c", "raise SystemExit(3)")))["failed"]
    sleeper = Part("emoji", ("-c", "import time; time.sleep(60)"))
    assert "0 s" in run(sleeper, 0.2)["failed"]
    (tmp_path / sleeper.folder).mkdir()
    for other in ({}, {"code": "of another checkout"}, {"device": "another"}, {"torch": "0.1"}):
        write_json(tmp_path / sleeper.folder / STORED, {"environment": environment("cpu") | other})
        assert ("failed" in run(sleeper, 0.2)) == bool(other)


def test_memory_is_estimated_for_every_engine(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    requests = pipe.requests(["sun"], 0)
    engines = [pipe.engine(pipe.method(name), requests) for name in ("ar", "eagle-2")]
    alone = [memory(pipe.model, [engine]) for engine in engines]
    both = memory(pipe.model, engines)
    assert both == {"peak_bytes": 7, "estimate_bytes": sum(one["estimate_bytes"] for one in alone)}
    assert alone[1]["estimate_bytes"] > alone[0]["estimate_bytes"] > 0


def test_tests_are_counted(tmp_path: Path) -> None:
    lines = ["import pytest"]
    for name, does in (("a", "pass"), ("b", "assert 0"), ("c", "pytest.skip('')")):
        lines += ["@pytest.mark.gpu", f"def test_{name}():", f"    {does}"]
    file = tmp_path / "test_gpu.py"
    file.write_text("\n".join([*lines, "def test_d():", "    assert 0"]))
    words = ("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", str(file))
    result = gpu_check.run(Part("tests", words), tmp_path, 60, "cpu")
    assert result["tests"] == {"passed": 1, "skipped": 1, "failed": ["test_b"]}


def test_the_commands_of_all_parts_are_accepted(run: Run) -> None:
    """Every family has a part, and bench takes the words of each."""
    parts = gpu_check.parts("cuda")
    assert {part.name for part in parts} == set(PARTS)
    assert len({part.folder for part in parts}) == len(parts)
    from cli.bench import Options, check, configurations

    for part in parts:
        if part.name != "tests":
            options = Options.parse(list(part.words[2:]))
            check(options)
            assert configurations(options)


def test_bad_words_and_no_gpu_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, name in (([], "no GPU"), (["anol"], "anol")):
        status, out, err = run("gpu_check", *words)
        assert (status, out, err.count("\n")) == (2, "", 1) and name in err
