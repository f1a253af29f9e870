"""Several processes: the images of a single one byte for byte, also if one is killed; its training steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import main
from eval.errors import UserError
from eval.locks import alone
from eval.measurements import Measurements
from eval.session import worker
from tests.checkpoints import Checkpoints
from tests.runs import statistics
from training import drafter_states

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [f"prompt {number}" for number in range(7)]
# A process that is killed with an image in hand.
DIES = """
import os, signal, sys
import main
from eval.outputs import RunFolder
made = []
def add(self, decoded, image, seconds, add=RunFolder.add):
    made.append(decoded.name)
    if len(made) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, decoded, image, seconds)
RunFolder.add = add
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def words(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command, but for its folder."""
    prompts = tmp_path_factory.mktemp("prompts") / "p.txt"
    prompts.write_text("\n".join(PROMPTS))
    words = ["generate_images", *checkpoints["emoji"].words(), "--prompt", str(prompts)]
    return [*words, *"--peanut --num_images -1 --heatmaps 2 --output_dir".split()]


def contents(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without its clocks and options."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".png":
            found[name] = path.read_bytes()
        elif name.startswith("global_statistics"):
            found[name] = list(statistics(folder).items())
        elif name == "steps.jsonl":
            lines = path.read_text().splitlines()
            found[name] = [{k: v for k, v in json.loads(line).items() if k != "ms"} for line in lines]
        else:
            found[name] = None
    return found


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a single process makes."""
    folder = tmp_path_factory.mktemp("whole") / "o"
    assert main.main([*words, str(folder)]) == 0
    return contents(folder)


def test_a_killed_process_loses_nothing(
    words: list[str], whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Process 1 of 2 dies, 0 ends its share, then 1 is started again: the run of a single process."""
    folder = tmp_path / "o"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    dying = [sys.executable, "-c", DIES, *words, str(folder)]
    killed = subprocess.run(dying, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -9
    assert [path.name for path in (folder / "queue").iterdir()] == ["1.json"]
    capsys.readouterr()
    for rank, made in (("0", 4), ("1", 2)):
        monkeypatch.setenv("RANK", rank)
        assert main.main([*words, str(folder)]) == 0
        out = capsys.readouterr().out
        assert f"process {rank} of 2: {made} images" in out and ('"images": 7' in out) == (rank == "1")
    assert contents(folder) == whole
    for rank, tells in (("1", False), ("0", True)):  # reruns change nothing, and one tells of all
        monkeypatch.setenv("RANK", rank)
        assert main.main([*words, str(folder)]) == 0
        assert ('"output_dir"' in capsys.readouterr().out) == tells
    assert contents(folder) == whole


@pytest.mark.timeout(300)  # three processes import torch
def test_accelerate_launch_trains_in_two_processes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each takes half of a step's images: the weights are those of one process with all of them."""
    prompts, data = tmp_path / "p.txt", tmp_path / "data"
    prompts.write_text("\n".join(PROMPTS))
    model = [*checkpoints["emoji"].words(), "--device", "cpu"]
    draw = ["generate_train_data", *model, "--prompt", str(prompts), "--output_dir", str(data)]
    assert main.main(draw) == 0
    train = ["train_drafter", *model, "--data_dir", str(data), "--coupled", "--data_noise", "none"]
    train += ["--lr", "1e-3", "--max_steps", "2", "--save_dir"]
    assert main.main([*train, str(tmp_path / "one"), "--bs", "4"]) == 0
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 main.py".split()
    run = subprocess.run(
        [sys.executable, "-m", *launch, *train, str(tmp_path / "two"), "--bs", "2"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["steps"] == 2
    one, two = (
        torch.load(drafter_states.states(tmp_path / name)[-1] / "trainer.pt", weights_only=True)["net"]
        for name in ("one", "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4)


def test_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert worker() == (0, 1)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
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
