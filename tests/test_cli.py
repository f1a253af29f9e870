"""The command from outside: outputs, errors, interruption, resumption; no option is swallowed, and nothing
that was finished is lost. Tiny random checkpoint."""

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
from eval.outputs import RunFolder
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run
from tests.runs import images, record, statistics

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
Command = Callable[..., list[str]]


@pytest.mark.parametrize("command", ["", "generate_images", "bench", "report", "train_drafter"])
def test_help_needs_no_torch_and_less_than_a_second(command: str) -> None:
    code = "import sys, main; s = main.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(s)"
    words = [sys.executable, "-c", code, *([command] if command else []), "--help"]
    seconds = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the processor: a busy machine is no fault
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "usage" in done.stdout and min(seconds) < 1


def test_outputs(generate: Run, tmp_path: Path) -> None:
    status, out, err = generate("o", *ADT.split(), "--heatmaps", "2", "--start_idx", "1", "--end_idx", "4")
    assert (status, err) == (0, "")
    summary = json.loads(out.splitlines()[-1])
    assert summary["images"] == 3 and summary["tau"] >= 1 and "tau" in out.splitlines()[1]
    folder = tmp_path / "o"
    expected = ["contact_sheet.png", "generation_configs.json", "global_statistics_1_4.json", "heatmap_1.png",
                "heatmap_2.png", "img", "steps.jsonl"]  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == expected
    statistics, images = record(folder)
    assert sorted(images) == ["1.png", "2.png", "3.png"]
    assert statistics["2"]["prompt"] == "cat face" and statistics["2"]["ann_id"] == 2
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert {"name", "position", "row", "column", "depth", "width", "nodes", "accepted", "ms", "top1"} == set(
        steps[0]
    )
    for name, entry in statistics.items():
        mine = [step for step in steps if step["name"] == name]
        assert len(mine) == entry["target_calls"] and sum(step["accepted"] + 1 for step in mine) == 15
        assert all((step["row"], step["column"]) == divmod(step["position"], 4) for step in mine)
    stored = json.loads((folder / "generation_configs.json").read_text())
    assert stored["peanut"] is True and stored["determines_images"]["adt"]["beta"] == 0.5


def test_one_seed_one_image_for_every_exact_method(generate: Run, tmp_path: Path) -> None:
    methods = {
        "base": ["--model_type", "base"], "default": [], "eagle2": EAGLE.split(), "eagle1": STATIC.split(),
        "adt": ADT.split(), "hybrid": ["--drafter_type", "hybrid"],
        "three": [*ADT.split(), "--batch_size", "3"],
        "chain": ["--static_tree", "--tree_choices", "chain"],
    }  # fmt: skip
    for temperature in ("0", "1"):
        found = []
        for name, words in methods.items():
            folder = f"{name}{temperature}"
            assert generate(folder, "--temperature", temperature, *words)[0] == 0
            found.append(record(tmp_path / folder)[1])
        assert all(images == found[0] for images in found[1:])


EAGLE, ADT, STATIC = "--drafter_type eagle", "--drafter_type eagle --peanut", "--static_tree"
REJECTION, SELF = "--verify rejection", "--drafter_type self-draft"
RELAXED = "--lantern --lantern_delta 0.9"
CHANGES = [
    (EAGLE, "--temperature 0.3"), (EAGLE, "--top_k 2"), (EAGLE, "--top_p 0.2"), (EAGLE, "--cfg 1"),
    (EAGLE, "--cfg 9"),
    (EAGLE, "--random_seed 7"), (EAGLE, "--precision bf16"), ("", "--model_type base"),
    (EAGLE, ADT),
    (EAGLE, STATIC), (EAGLE, REJECTION), (EAGLE, RELAXED), (EAGLE, "--total_token 4"), (EAGLE, "--depth 1"),
    (EAGLE, "--draft_top_k 1"), (EAGLE, "--slice 1-3"), (EAGLE, "--num_images 2"), (EAGLE, "--start_idx 2"),
    (EAGLE, "--end_idx 2"), (EAGLE, "--prompt moon"), (STATIC, "--tree_choices chain"),
    (STATIC, "--tree_choices naive_extend_57"), (RELAXED, "--lantern_k 40"),
    (RELAXED, "--lantern_delta 0.01"), (EAGLE, "--drafter_alignment unshifted"),
    (f"{REJECTION} {RELAXED} --static_tree", "--rules reference"), (ADT, "--adt_init vertical"),
    (ADT, "--adt_init both"), (ADT, "--adt_init random"), (ADT, "--adt_beta 0"), (ADT, "--adt_step_depth 4"),
    (f"{ADT} --total_token 40", "--adt_step_width 3"), (ADT, "--adt_depth_min 3"), (ADT, "--adt_depth_max 2"),
    (f"{ADT} --adt_beta 0 --total_token 90", "--adt_width_min 3"),
    (f"{ADT} --total_token 90", "--adt_width_max 2"),
    (ADT, "--adt_depth_start 2"), (f"{ADT} --total_token 90", "--adt_width_start 4"),
    (ADT, "--total_token 4"), (EAGLE, SELF),
    (SELF, "--depth 2"), (SELF, "--draft_top_k 1"), (SELF, "--peanut"),
]  # fmt: skip


@pytest.fixture(scope="module")
def unchanged() -> dict[str, Any]:
    """What the base of each change leaves, made once."""
    return {}


@pytest.mark.parametrize(("base", "change"), CHANGES)
def test_every_option_changes_the_output_or_the_record(
    generate: Run, tmp_path: Path, unchanged: dict[str, Any], base: str, change: str
) -> None:
    if base not in unchanged:
        assert generate("a", *base.split())[0] == 0
        unchanged[base] = record(tmp_path / "a")
    status, _, err = generate("b", *base.split(), *change.split())
    assert status == 0, err
    assert unchanged[base] != record(tmp_path / "b")


def test_flags_that_change_no_image_stand_in_the_record(generate: Run, tmp_path: Path) -> None:
    words = "--set_seed --batch_size 2 --device cpu --cfg_mode parallel --target_size 8"
    generate("a")
    assert generate("b", *words.split())[0] == 0
    assert record(tmp_path / "a") == record(tmp_path / "b")
    stored = json.loads((tmp_path / "b" / "generation_configs.json").read_text())
    assert (stored["set_seed"], stored["batch_size"], stored["cfg_mode"]) == (True, 2, "parallel")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target_size", "512"], "--target_size 512"),
        (["--lantern", "--lantern_k", "63"], "lantern_k 63"),
        (["--draft_top_k", "65"], "65 nodes wide"),
        (["--prompt", "word " * 2000], "prompt"),
        (["--drafter_path", "nowhere"], "nowhere"),
        (["--model_path", "nowhere"], "nowhere"),
        (["--lantern", "--lantern_table", "nowhere"], "--lantern_table nowhere"),
        (["--revision", "main", "--model_path", "configs"], "configs"),
        (["--lantern_kk", "3"], "did you mean --lantern_k"),
        (["--cuda_graphs", "--device", "cpu"], "--cuda_graphs: this runs on the CPU"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_leaves_no_folder(
    generate: Run, tmp_path: Path, words: list[str], says: str
) -> None:
    status, out, err = generate("o", *EAGLE.split(), *words)
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err and len(err) < 500
    assert not (tmp_path / "o").exists()


def test_interrupt_and_resume_lose_nothing(
    generate: Run, command: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--peanut --batch_size 2 --heatmaps 3".split()
    assert generate("whole", *words)[0] == 0
    add, made = RunFolder.add, []

    def stop_at_third(folder: RunFolder, decoded: Any, image: Any, decode_s: float) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(decoded.name)
        add(folder, decoded, image, decode_s)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", stop_at_third)
        status, _, err = generate("parts", *words)
        assert (status, err.count("\n")) == (130, 1) and "interrupted" in err
    assert sorted(statistics(tmp_path / "parts")) == sorted(made)
    status, out, _ = generate("parts", *words)
    assert status == 0 and json.loads(out.splitlines()[-1])["skipped"] == 2
    assert "temperature" in refused(*command("parts", "--peanut", "--temperature", "0.5"))
    assert record(tmp_path / "parts") == record(tmp_path / "whole")
    for name in ("contact_sheet.png", "heatmap_0.png"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_our_own_faults_are_told_apart(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("cli.generate_images.method_from", broken)
    status, _, err = generate("o")
    assert status == 1 and err.startswith("internal error: RuntimeError: two lines") and err.count("\n") == 1
    with pytest.raises(RuntimeError):
        generate("o", "--debug")


@pytest.mark.parametrize(
    "words", ["generate_image", "train_emoji dta", "memory --precision int3", "memory x1"]
)
def test_unknown_commands_and_choices(refused: Refused, words: str) -> None:
    assert words.split()[-1] in refused(*words.split())


def test_overviews(run: Run) -> None:
    for words in ("", "--help", "train_emoji", "train_emoji --help"):
        status, out, err = run(*words.split())
        assert status == 0 and not err and "tokenizer" in out


def test_a_disk_that_fills_up(
    generate: Run, command: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "o"
    with monkeypatch.context() as patch:
        real = Path.write_bytes

        def filling(path: Path, data: bytes) -> int:
            if (folder / "img" / "0.png").exists() and (folder / "queue" / "0.json").exists():
                raise OSError(28, "No space left on device")
            return real(path, data)

        patch.setattr(Path, "write_bytes", filling)
        assert "No space left on device: " in refused(*command("o"))
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


def test_logits_that_are_no_numbers(
    generate: Run, command: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                err = refused(*command(*words.split()))
                assert "logits are not numbers" in err and err.startswith("error: image ")
    assert "0.png" in images(tmp_path / "o")
    assert generate("o", "--drafter_type", "eagle")[0] == 0
    assert record(tmp_path / "o") == whole


def test_two_runs_in_one_folder(generate: Run, command: Command, tmp_path: Path) -> None:
    words = [sys.executable, "main.py", *command("two")]
    how = {"cwd": ROOT, "env": ONE_THREAD, "text": True, "stdout": subprocess.PIPE}
    runs = [subprocess.Popen(words, **how) for _ in range(2)]
    told = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert all(json.loads(out.splitlines()[-1])["images"] == 5 for out in told)
    assert generate("o")[0] == 0
    assert record(tmp_path / "two") == record(tmp_path / "o")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_by_the_keyboard_or_a_scheduler(
    sent: signal.Signals, command: Command, tmp_path: Path
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
