"""report: stored results as tables, and into documents between their markers."""

import json
from pathlib import Path

import pytest

import main

ROW = {
    "arm": "eagle2", "temperature": 1.0, "SR": 1.5, "SR_95": [1.4, 1.6], "tau": 3.25, "mean_depth": 5.0,
    "mean_nodes": 16.0, "target_calls": 80.0, "drafter_calls": 400.0, "median_s": 0.5, "same_image": 1.0,
}  # fmt: skip
RESULT = {
    "command": "python main.py bench", "dirty": False, "prompts": 16, "cfg": 3.0, "precision": "fp32",
    "threads": 2,     "device": "a CPU", "torch": "2", "commit": "abc1234", "date": "today",
    "results": [ROW, {**ROW, "arm": "adt"}],
    "profile": [{"arm": "adt", "temperature": 1.0, "target": 0.6, "host": 0.4}],
}  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "bench_cpu.json"
    path.write_text(json.dumps(RESULT))
    return path


def test_table_names_figures_and_circumstances(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "| eagle2 | 1 | 1.50 (1.40-1.60) | 3.25 |" in out and "| adt | 1 | 60% | 40% |" in out
    assert all(word in out for word in ("abc1234", "a CPU", "16 prompts", "`python main.py bench`", "fp32"))
    assert "assembled" not in out
    stored.write_text(json.dumps({**RESULT, "runs": [{"measurements": 3}, {"measurements": 1}]}))
    assert main.main(["report", str(stored)]) == 0 and "assembled from 2 runs." in capsys.readouterr().out
    assert main.main(["report", str(stored), "--top", "1"]) == 0
    assert "| adt | 1 | 1.50" not in capsys.readouterr().out


def test_a_document_is_updated_between_its_markers(stored: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("top\n<!-- bench_cpu:start -->\nold\n<!-- bench_cpu:end -->\nend\n")
    for _ in range(2):
        assert main.main(["report", str(stored), "--into", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("top\n") and text.endswith("<!-- bench_cpu:end -->\nend\n")
        assert "old" not in text and text.count("| eagle2 |") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": []}', "\udcff"])
def test_what_is_no_result_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert main.main(["report", str(path)]) == 2
    assert main.main(["report", str(tmp_path / "absent.json")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2 and "bad.json" in err and "absent.json" in err


def test_results_of_another_command_are_named(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"proposer": "eagle", "policy": "fixed", "tau": 2.0, "SR": 1.4}
    stored.write_text(json.dumps({**RESULT, "results": [row]}))
    assert main.main(["report", str(stored)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "SR_95" in err and "bench, sweep or budget" in err


def test_a_document_without_markers(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    assert main.main(["report", str(stored), "--into", str(page)]) == 2
    assert "bench_cpu:start" in capsys.readouterr().err and page.read_text() == "nothing here\n"
