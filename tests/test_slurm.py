"""scripts/slurm_generate.sbatch: tasks of an array, one of them killed and repeated, leave the folder that
one process leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Command, Run
from tests.runs import ROOT, SIGNALLED, contents, images

SCRIPT = ROOT / "scripts" / "slurm_generate.sbatch"
OPTIONS = ("--method", "adt-tree", "--heatmaps", "2")
Task = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """Returns a function that runs a task of an array of two as SLURM does: with a copy of the script, in the
    folder of submission, and with the variables that SLURM derives from --array of this submission."""
    copy = tmp_path / "slurm_script"
    text = SCRIPT.read_text().replace("--array=0-7", "--array=0-1").replace("WORLD_SIZE=8", "WORLD_SIZE=2")
    copy.write_text(text)

    def run(task_id: int, array: range, words: list[str], program: object = sys.executable) -> object:
        variables = {
            "SLURM_ARRAY_TASK_ID": task_id, "SLURM_ARRAY_TASK_COUNT": len(array),
            "SLURM_ARRAY_TASK_MIN": array[0], "SLURM_SUBMIT_DIR": ROOT, "SLURM_CPUS_PER_TASK": 1,
            "PYTHON": program,
        }  # fmt: skip
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 100}
        return subprocess.run(["bash", copy, *words], **options)

    return run


@pytest.mark.timeout(180)
def test_a_killed_task_is_repeated_alone(
    task: Task, generate: Run, command: Command, run: Run, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    killed.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{SIGNALLED}' 9 add 2 \"$@\"\n")
    killed.chmod(0o755)
    words = command("o", *OPTIONS)[1:]
    assert task(1, range(2), words, killed).returncode == -9  # it dies before it stores its second image
    assert list(images(tmp_path / "o")) == ["1.png"]
    first = task(0, range(2), words)
    assert first.returncode == 0 and "process 0 of 2: 3 images" in first.stdout, first.stderr

    status, out, _ = run("report", tmp_path / "o", "--check")
    assert status == 1 and [line.split(":")[0] for line in out.splitlines()] == [
        str(tmp_path / "o" / "records" / "3.json"), str(tmp_path / "o" / "img" / "3.png")
    ]  # fmt: skip

    again = task(1, range(1, 2), words)  # sbatch --array=1: an array of one task
    assert again.returncode == 0 and "process 1 of 2: 1 images" in again.stdout, again.stderr
    status, out, _ = run("report", tmp_path / "o", "--check")
    assert status == 0 and out.count("\n") == 1
    assert generate("whole", *OPTIONS)[0] == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


@pytest.mark.parametrize("task_id", [-1, 2])
def test_a_task_outside_the_array_is_refused(task: Task, task_id: int) -> None:
    done = task(task_id, range(task_id, task_id + 1), [], "false")
    assert done.returncode == 2 and f"task {task_id}" in done.stderr and "WORLD_SIZE" in done.stderr
