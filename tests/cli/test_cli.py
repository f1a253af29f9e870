"""The commands seen from outside: outputs, errors, several processes, and that every option has an effect.
The checkpoint is tiny and random."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import main
from adt_tree.errors import UserError
from main import COMMANDS
from storage import process
from storage.process import worker
from storage.run_folder import read_records
from tests.conftest import Command, Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.runs import ROOT, images, python, record
from training import drafter_states


@pytest.mark.parametrize("command", ["", "generate_images"])
def test_help_needs_no_torch_and_less_than_a_second(command: str) -> None:
    code = "import sys, main; s = main.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(s)"
    seconds = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-c", code, *command.split(), "--help")
        # Processor time, which a busy machine does not lengthen.
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr
    assert min(seconds) < 1


def test_outputs(generate: Run, tmp_path: Path) -> None:
    status, out, err = generate("o", *ADT.split(), "--heatmaps", "2", "--start_idx", "1", "--end_idx", "4")
    assert (status, err) == (0, "")
    summary = json.loads(out.splitlines()[-1])
    assert summary["images"] == 3 and summary["tau"] >= 1 and "tau" in out.splitlines()[2]
    folder = tmp_path / "o"
    expected = ["contact_sheet.png", "generation_configs.json", "global_statistics_1_4.json",
                "heatmap_1.png", "heatmap_2.png", "img", "records"]  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == expected
    statistics, images = record(folder)
    assert sorted(images) == ["1.png", "2.png", "3.png"]
    assert statistics["2"]["prompt"] == "cat face" and statistics["2"]["ann_id"] == 2
    steps = [step for image in read_records(folder) for step in image.steps]
    assert " ".join(steps[0]) == "position row column depth width nodes accepted ms top1 budget"
    assert sum(step["accepted"] + 1 for step in steps) == 3 * 15
    stored = json.loads((folder / "generation_configs.json").read_text())
    assert stored["method"] == "adt-tree" and "beta=0.5" in stored["fingerprint"]["tree"]


ADT = "--method adt-tree"


def test_flags_change_the_images_or_stand_in_the_record(generate: Run, tmp_path: Path) -> None:
    """test_options.py checks that all options of a method change the method, and test_prompts.py those that
    choose prompts."""
    words = "--set_seed --batch_size 2 --device cpu --target_size 8"
    # Automatic trees depend on measured times, so they differ from run to run.
    fixed = ("--total_token", "32")
    generate("a", *fixed)
    assert generate("b", *fixed, *words.split())[0] == 0
    assert record(tmp_path / "a") == record(tmp_path / "b")
    stored = json.loads((tmp_path / "b" / "generation_configs.json").read_text())
    assert (stored["set_seed"], stored["batch_size"]) == (True, 2)
    assert stored["cuda_graphs"] is False, "the default, None, means no graphs on a CPU"
    for change in ("--random_seed 7", "--precision bf16"):
        assert generate(change, *fixed, *change.split())[0] == 0
        assert record(tmp_path / "a") != record(tmp_path / change), change


@pytest.mark.parametrize("inside", [False, True])
def test_code_outside_of_git_is_no_clean_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool
) -> None:
    """Nor is code in the repository of something else."""
    monkeypatch.setattr(process, "ROOT", tmp_path)
    if inside:
        for words in ("init -q", "-c user.name=x -c user.email=x commit -q --allow-empty -m x"):
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    origin = process.environment("cpu")
    assert origin["commit"] is origin["dirty"] is None and origin["code"]


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_command_needs_no_streams(command: Command, tmp_path: Path, closed: str) -> None:
    """As under cron or systemd. No file of the run takes the number of a stream that is closed."""
    words = shlex.join([sys.executable, "main.py", *command("o", "--method", "ar", "--num_images", "2")])
    done = subprocess.run(["sh", "-c", f"exec {words} {closed}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (('"images": 2' in done.stdout) == (closed == "2>&-"))
    assert {path.stat().st_size > 100 for path in (tmp_path / "o").rglob("*.*")} == {True}
    assert len(images(tmp_path / "o")) == 2


def test_overviews(run: Run) -> None:
    for words in ((), ("--help",)):
        status, out, err = run(*words)
        assert status == 0 and not err and all(f"  {name} " in out for name in COMMANDS)


def test_a_disk_that_fills_up_while_a_drafter_is_made(
    run: Run, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompts, data, save = tmp_path / "p.txt", tmp_path / "data", tmp_path / "run"
    prompts.write_text("red heart\npizza\ncat face\n")
    model = [*checkpoints["emoji"].words(), "--device", "cpu"]
    make_data = ["generate_train_data", *model, "--prompt", prompts, "--output_dir", data, "--features"]
    train = ["train_drafter", *model, "--data_dir", data, "--save_dir", save, "--bs", "2"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words, size, file, steps in (
        (make_data, 100, data / "data_00000.safetensors", ()),
        (train, 1_000, save / ".state_0.part" / "model.safetensors", ("--max_steps", "0")),
        (train, 100_000, save / ".state_1.part" / "trainer.pt", ("--max_steps", "1")),
    ):
        before = sorted(tmp_path.rglob("*"))
        try:  # the system refuses to write files beyond this size, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            status, _, err = run(*words, *steps)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        line = err.splitlines()[-1]
        assert status == 2 and line.startswith("error: ") and str(file) in line
        assert "too large" in line.lower()
        created = {*tmp_path.rglob("*")} - {*before}
        assert all(path.is_dir() or path.name == "log.jsonl" for path in created), created
        assert run(*words, *steps)[0] == 0
    assert len((save / "log.jsonl").read_text().splitlines()) == 2


@pytest.mark.timeout(300)  # three processes import torch
def test_accelerate_launch_trains_in_two_processes(
    checkpoints: Checkpoints, run: Run, tmp_path: Path
) -> None:
    """Each process takes half of a step's images, and half of the images of validation; the weights and the
    agreement are those of one process that takes all."""
    prompts, data = tmp_path / "p.txt", tmp_path / "data"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(8)))
    model = [*checkpoints["emoji"].words(), "--device", "cpu"]
    assert run("generate_train_data", *model, "--prompt", prompts, "--output_dir", data)[0] == 0
    train = ["train_drafter", *model, "--data_dir", str(data), "--coupled", "--data_noise", "none"]
    train += ["--lr", "1e-3", "--max_steps", "2", "--train_data_ratio", "0.5", "--save_dir"]
    status, out, _ = run(*train, tmp_path / "one", "--bs", 4)
    assert status == 0
    alone = json.loads(out.splitlines()[-1])
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 main.py".split()
    done = python("-m", *launch, *train, tmp_path / "two", "--bs", 2, timeout=280)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["steps"] == 2 and last["agreement"] == pytest.approx(alone["agreement"], abs=2e-4)
    one, two = (
        torch.load(drafter_states.states(tmp_path / name)[-1] / "trainer.pt", weights_only=True)["net"]
        for name in ("one", "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4)


LAUNCHED: dict[str, tuple[int, int]] = {  # variables of a process -> its number and their count
    "": (0, 1), "RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=4": (1, 2),
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4": (2, 4), "PMI_RANK=1 PMI_SIZE=3": (1, 3),
    "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=8": (3, 4),
    "SLURM_PROCID=0 SLURM_NTASKS=1": (0, 1), "SLURM_PROCID=0": (0, 1), "SLURM_NTASKS=4": (0, 1),
    "SLURM_PROCID=0 SLURM_NTASKS=4": (0, 1),
}  # fmt: skip


@pytest.mark.parametrize("variables", LAUNCHED)
def test_processes_of_a_launcher(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert worker() == LAUNCHED[variables]


@pytest.mark.parametrize("rank", ["2", "-1", "a"])
def test_a_process_outside_of_a_launchers_numbers_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f"RANK={rank} with WORLD_SIZE=2" in refused("generate_images")


@pytest.mark.parametrize("command", ["bench", "generate_train_data"])
def test_a_command_for_one_process_refuses_a_launcher(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 processes" in refused(command)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("--cfg 7"), 2),
        (OSError(28, "No space left on device", "img/1.png"), 2),
        (MemoryError("8 GiB"), 2),
        (FloatingPointError("image 3"), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 2),
        (RuntimeError("alloc_cpu.cpp:117: DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), 2),
        (ValueError("a fault of ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exit_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every class of error ends the command with its exit status and one line that names what the exception
    names."""

    def fail(argv: object) -> None:
        raise error

    monkeypatch.setattr(main, "dispatch", fail)
    with pytest.raises(type(error)):
        main.main(["bench", "--debug"])
    assert main.main(["bench"]) == status
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and str(error.args[-1] if error.args else "") in line
    assert line.startswith("internal error: ") == (status == 1)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'matplotlib'"),
        AttributeError("numpy has no attribute x"),  # a package that does not fit another one
        OSError(28, "No space left on device"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("eval.figures._figure", broken)
    status, out, printed = generate("o", "--method", "eagle-2", "--num_images", "1", "--heatmaps", "1")
    assert status == 0 and json.loads(out.splitlines()[-1])["images"] == 1
    assert (tmp_path / "o" / "contact_sheet.png").is_file()
    (line,) = [line for line in printed.splitlines() if "heatmap_" in line]
    assert str(error) in line
