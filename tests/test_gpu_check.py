"""gpu_check on the CPU: every part runs with tiny shapes, says what it could not measure, and can fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import main
from eval import gpu_check, gpu_parts
from eval.gpu_parts import TREES, Setting


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Status, the document of the last line printed, and the errors."""
    status = main.main(["gpu_check", "--device", "cpu", "--codes", "32", *words])
    out, err = capsys.readouterr()
    return status, json.loads(out.strip().splitlines()[-1]), err


@pytest.mark.parametrize("part", ["lumina_mgpt", "llamagen2"])
def test_speed_of_random_weights(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "check.json"
    status, document, _ = checked(capsys, "--parts", part, "--output", str(output))
    assert status == 0 and document == json.loads(output.read_text())
    found = document["parts"][part]
    assert (document["shapes"], document["cuda"]) == ("tiny", False)
    assert [row["arm"] for row in found["cycles"]] == list(TREES)
    assert [row["nodes"] for row in found["cycles"]] == [1, 26, 59, 64, 64]
    assert all(row["cycle_ms"] > 0 and row["cycles"] > 1 for row in found["cycles"])
    assert all("no CUDA" in row["waits_a_cycle"] for row in found["cycles"]) and "no CUDA" in found["peak_gb"]
    (passes,) = found["passes"]
    assert min(*passes["pass_ms"].values(), passes["drafter_level_ms"], found["read_ms"]) > 0


def test_tokens(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal as things are; other codes are a failure, told in one line and by the status."""
    words = ("--parts", "tokens", "--model_path", str(tiny_checkpoint), "--output", str(tmp_path / "c.json"))
    status, document, _ = checked(capsys, *words)
    rows = document["parts"]["tokens"]["runs"]
    assert status == 0 and len(rows) == 2 * len(TREES) and not any(row["different"] for row in rows)
    monkeypatch.setitem(gpu_parts.TREES, "ar", {"control": "ceiling", **gpu_parts.TREES["dynamic 59"]})
    status, document, err = checked(capsys, *words)
    assert status == 2 and len(err.strip().splitlines()) == 1
    assert "runs drew other codes" in document["parts"]["tokens"]["failed"] and "failed: tokens" in err


def test_published_shapes() -> None:
    """Of all models with random weights; 26, 59 and 64 nodes, root included."""
    for name in gpu_parts.SHAPED:
        use = gpu_parts.use_of(name, "published")
        assert use.decoder.num_layers >= 32 and use.drafter.num_layers == 1
    assert Setting.of("cpu", "tiny", 32, None).graphs == (False,)
    assert Setting(torch.device("cuda"), "tiny", 32, Path()).graphs == (False, True)


@pytest.mark.parametrize(
    "last, status, found",
    [
        ("3 passed, 2 skipped in 1.0s", 0, {"counts": {"passed": 3, "skipped": 2}}),
        ("1 failed, 3 passed in 1.0s", 1, {"failed": "1 failed, 3 passed in 1.0s"}),
        ("", 5, {"failed": "exit 5"}),
    ],
)
def test_the_marked_tests(last: str, status: int, found: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess((), status, f"...\n{last}\n" if last else "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert gpu_check.run_tests() == found


def test_one_part_does_not_hide_the_others() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("CUDA out of\nmemory")

    assert gpu_check.attempt(broken, debug=False)["failed"] == "RuntimeError: CUDA out of memory"
    with pytest.raises(RuntimeError):
        gpu_check.attempt(broken, debug=True)
