"""Several processes: the images of a single one byte for byte, also if one is killed; its training steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval.errors import UserError
from eval.locks import alone
from eval.measurements import Measurements
from eval.session import worker
from tests.checkpoints import Checkpoints
from tests.conftest import Run
from tests.runs import ROOT, contents, ended
from training import drafter_states


def test_a_killed_process_loses_nothing(
    generate: Run, command: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 of 2 dies, 0 ends its share, then 1 is started again: the run of a single process."""
    options = "--peanut --heatmaps 2".split()
    assert generate("whole", *options)[0] == 0
    whole = contents(tmp_path / "whole")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ended(signal.SIGKILL, command("o", *options)).returncode == -9
    assert [path.name for path in (tmp_path / "o" / "queue").iterdir()] == ["1.json"]
    for rank, made in (("0", 3), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        status, out, _ = generate("o", *options)
        assert status == 0 and f"process {rank} of 2: {made} images" in out
        assert ('"images": 5' in out) == (rank == "1")
    assert contents(tmp_path / "o") == whole
    for rank, tells in (("1", False), ("0", True)):  # reruns change nothing, and one tells of all
        monkeypatch.setenv("RANK", rank)
        status, out, _ = generate("o", *options)
        assert status == 0 and ('"output_dir"' in out) == tells
    assert contents(tmp_path / "o") == whole


@pytest.mark.timeout(300)  # three processes import torch
def test_accelerate_launch_trains_in_two_processes(
    checkpoints: Checkpoints, run: Run, tmp_path: Path
) -> None:
    """Each takes half of a step's images: the weights are those of one process with all of them."""
    prompts, data = tmp_path / "p.txt", tmp_path / "data"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(7)))
    model = [*checkpoints["emoji"].words(), "--device", "cpu"]
    assert run("generate_train_data", *model, "--prompt", prompts, "--output_dir", data)[0] == 0
    train = ["train_drafter", *model, "--data_dir", str(data), "--coupled", "--data_noise", "none"]
    train += ["--lr", "1e-3", "--max_steps", "2", "--save_dir"]
    assert run(*train, tmp_path / "one", "--bs", 4)[0] == 0
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 main.py".split()
    done = subprocess.run(
        [sys.executable, "-m", *launch, *train, str(tmp_path / "two"), "--bs", "2"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    one, two = (
        torch.load(drafter_states.states(tmp_path / name)[-1] / "trainer.pt", weights_only=True)["net"]
        for name in ("one", "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4)


def test_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert worker() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert worker() == (3, 4)
    for name, value in (("RANK", "4"), ("WORLD_SIZE", "x")):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"{name}="):
            worker()


def test_two_processes_do_not_measure_in_one_folder(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from eval.measurements import Measurements
store = Measurements(Path(sys.argv[1]), "today", {"cfg": 3}, {})
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="is being written by another process"):
            Measurements(tmp_path, "today", {"cfg": 3}, {})
        other.communicate("")
    Measurements(tmp_path, "today", {"cfg": 3}, {})


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, what: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(UserError, match="cannot be locked .Operation not supported.; choose an --output_dir"):
        alone(tmp_path / "f")
