"""What goes wrong while images are made: one line that says so, and nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adt_tree import decode
from tests.checkpoints import Checkpoints
from tests.conftest import Run
from tests.runs import images, record, statistics

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def one_line(out: tuple[int, str, str]) -> str:
    """The line on standard error of a command that ended with status 2."""
    status, _, err = out
    assert (status, err.count("\n")) == (2, 1) and "Traceback" not in err, err
    return err


def test_a_disk_that_fills_up(generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "o"
    with monkeypatch.context() as patch:
        real = Path.write_bytes

        def filling(path: Path, data: bytes) -> int:
            if (folder / "img" / "0.png").exists() and (folder / "queue" / "0.json").exists():
                raise OSError(28, "No space left on device")
            return real(path, data)

        patch.setattr(Path, "write_bytes", filling)
        assert "No space left on device: " in one_line(generate("o"))
    assert list(images(folder)) == ["0.png"] and not list(folder.rglob(".*.??????*"))
    first = images(folder)["0.png"]
    assert generate("o")[0] == 0
    assert images(folder)["0.png"] == first and len(statistics(folder)) == 5


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse what is written beyond so many bytes, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_while_a_drafter_is_made(
    run: Run, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompts, data, save = tmp_path / "p.txt", tmp_path / "data", tmp_path / "run"
    prompts.write_text("red heart\npizza\ncat face\n")
    model = [*checkpoints["emoji"].words(), "--device", "cpu"]
    draw = ["generate_train_data", *model, "--prompt", prompts, "--output_dir", data, "--features"]
    train = ["train_drafter", *model, "--data_dir", data, "--save_dir", save, "--bs", "2"]
    for words, size, file, steps in (
        (draw, 100, data / "data_00000.safetensors", ()),
        (train, 1_000, save / ".state_0.part" / "model.safetensors", ("--max_steps", "0")),
        (train, 100_000, save / ".state_1.part" / "trainer.pt", ("--max_steps", "1")),
    ):
        before = sorted(tmp_path.rglob("*"))
        with files_of_at_most(size):
            status, _, err = run(*words, *steps)
        line = err.splitlines()[-1]
        assert status == 2 and line.startswith("error: ") and str(file) in line and "oo large" in line
        made = {*tmp_path.rglob("*")} - {*before}
        assert all(path.is_dir() or path.name == "log.jsonl" for path in made), made
        assert run(*words, *steps)[0] == 0
    assert len((save / "log.jsonl").read_text().splitlines()) == 2


def test_logits_that_are_no_numbers(generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate("o", "--drafter_type", "eagle")[0] == 0
    whole = record(tmp_path / "o")
    (tmp_path / "o").rename(tmp_path / "whole")
    calls: list[torch.Tensor] = []
    good = 0

    def broken(logits: torch.Tensor, sampling: Any, real: Any = decode.log_probs) -> torch.Tensor:
        calls.append(logits)
        return real(logits * float("nan") if len(calls) > good else logits, sampling)

    with monkeypatch.context() as patch:
        patch.setattr("adt_tree.decode.log_probs", broken)
        for count in (0, 3, 24):  # calls until the prefill, in the first image, after it
            good = count
            for words in ("o --drafter_type eagle", "base --model_type base"):
                calls.clear()
                err = one_line(generate(*words.split()))
                assert "logits are not numbers" in err and "error: image " in err
    assert "0.png" in images(tmp_path / "o")
    assert generate("o", "--drafter_type", "eagle")[0] == 0
    assert record(tmp_path / "o") == whole


def test_steps_that_are_no_text_are_kept_as_they_are(generate: Run, tmp_path: Path) -> None:
    assert generate("o", "--end_idx", "2")[0] == 0
    steps = tmp_path / "o" / "steps.jsonl"
    odd = b'{"name": "of another window \xff"}\n'
    whole = steps.read_bytes()
    steps.write_bytes(odd + b"17\n" + whole + b'{"name": "0", "po')
    assert generate("o", "--end_idx", "2", "--heatmaps", "1")[0] == 0
    assert steps.read_bytes() == odd + whole


def test_prompts_with_path_separators_stay_in_the_folder(generate: Run, tmp_path: Path) -> None:
    names = ["../../up", "/etc/passwd", "a/b", "a\\b", "con", "..", "."]
    table = tmp_path / "p.csv"
    table.write_text("name,prompt\n" + "".join(f"{name},red/heart ../{name}\n" for name in names))
    before = set(tmp_path.rglob("*"))
    status, _, err = generate("o", "--prompt", table)
    assert status == 0, err
    assert len(images(tmp_path / "o")) == len(names) and list(statistics(tmp_path / "o")) == names
    made = set(tmp_path.rglob("*")) - before
    assert all(path == tmp_path / "o" or tmp_path / "o" in path.parents for path in made)


def test_two_runs_in_one_folder(generate: Run, command: Callable[..., list[str]], tmp_path: Path) -> None:
    words = [sys.executable, "main.py", *command("two")]
    how = {"cwd": ROOT, "env": ONE_THREAD, "text": True, "stdout": subprocess.PIPE}
    runs = [subprocess.Popen(words, **how) for _ in range(2)]
    told = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert all(json.loads(out.splitlines()[-1])["images"] == 5 for out in told)
    assert generate("o")[0] == 0
    assert record(tmp_path / "two") == record(tmp_path / "o")
    assert "cfg = 3.0, now it is 2.0" in one_line(generate("o", "--cfg", "2"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_by_the_keyboard_or_a_scheduler(
    sent: signal.Signals, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    prompts = tmp_path / "many.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(400)))
    run = subprocess.Popen(
        [sys.executable, "main.py", *command("o", "--prompt", prompts, "--num_images", "-1")],
        cwd=ROOT, env=ONE_THREAD, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, sent, signal.SIG_DFL),  # a job in the background may ignore SIGINT
    )  # fmt: skip
    while not list((tmp_path / "o").glob("queue/*.json")):
        time.sleep(0.02)
        assert run.poll() is None
    run.send_signal(sent)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 130 and out == ""
    assert len(err.splitlines()) == 1 and "the same command goes on from there" in err
    done = statistics(tmp_path / "o")
    assert 1 <= len(done) < 400 and {f"{name}.png" for name in done} <= set(images(tmp_path / "o"))
