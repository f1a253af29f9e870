"""The command from outside: errors, outputs, resumption; no option is swallowed. Tiny random checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import main
from eval.outputs import RunFolder
from tests.tiny import tiny_words

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = ("time", "latency")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run main.py in this process: (status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.main(list(words))
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def generate(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> Run:
    """generate_images on the tiny checkpoint; the first word is the output folder's name."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red heart\npizza\ncat face\nsun\nrocket\n")

    def call(folder: str, *words: str) -> tuple[int, str, str]:
        fixed = tiny_words(tiny_checkpoint, prompts, heatmaps=0)
        return run("generate_images", *fixed, "--output_dir", str(tmp_path / folder), *words)

    return call


def record(folder: Path, without: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Statistics without clocks and the given fields, and the images, of a run."""
    (path,) = folder.glob("global_statistics_*.json")
    statistics = json.loads(path.read_text())
    kept = {
        name: {k: v for k, v in entry.items() if k not in (*CLOCKS, *without)}
        for name, entry in statistics.items()
    }
    return kept, {file.name: file.read_bytes() for file in (folder / "img").iterdir()}


def one_line(err: str) -> str:
    """The single line of stderr."""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


@pytest.mark.parametrize(
    "command", ["", "generate_images", "bench", "sweep", "reliability", "budget", "replay", "throughput"]
)
def test_help_needs_no_torch_and_less_than_a_second(command: str) -> None:
    code = "import sys, main; s = main.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(s)"
    words = [sys.executable, "-c", code, *([command] if command else []), "--help"]
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
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
    assert {"name", "position", "row", "column", "depth", "width", "nodes", "accepted", "ms"} == set(steps[0])
    for name, entry in statistics.items():
        mine = [step for step in steps if step["name"] == name]
        assert len(mine) == entry["target_calls"] and sum(step["accepted"] + 1 for step in mine) == 15
        assert all((step["row"], step["column"]) == divmod(step["position"], 4) for step in mine)
    stored = json.loads((folder / "generation_configs.json").read_text())
    assert stored["peanut"] is True and stored["determines_images"]["adt"]["beta"] == 0.5


def test_one_seed_one_image_for_every_exact_method(generate: Run, tmp_path: Path) -> None:
    methods = {
        "base": ["--model_type", "base"], "default": [], "eagle2": EAGLE.split(), "eagle1": STATIC.split(),
        "adt": ADT.split(), "hybrid": ["--drafter_type", "hybrid"], "none": ["--drafter_type", "none"],
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
REJECTION, JACOBI = "--verify rejection", "--drafter_type jacobi"
RELAXED = "--lantern --lantern_delta 0.9"
CHANGES = [
    (EAGLE, "--temperature 0.3"), (EAGLE, "--top_k 2"), (EAGLE, "--top_p 0.2"), (EAGLE, "--cfg 1"),
    (EAGLE, "--cfg 9"),
    (EAGLE, "--random_seed 7"), (EAGLE, "--precision bf16"), ("", "--model_type base"),
    ("", "--drafter_type none"), (EAGLE, ADT),
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
    (ADT, "--total_token 4"), (EAGLE, JACOBI),
    (JACOBI, "--depth 2"), (JACOBI, "--draft_top_k 1"), (JACOBI, "--peanut"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "change"), CHANGES)
def test_every_option_changes_the_output_or_the_record(
    generate: Run, tmp_path: Path, base: str, change: str
) -> None:
    assert generate("a", *base.split())[0] == 0
    status, _, err = generate("b", *base.split(), *change.split())
    assert status == 0, err
    assert record(tmp_path / "a") != record(tmp_path / "b")


def test_flags_that_change_no_image_stand_in_the_record(generate: Run, tmp_path: Path) -> None:
    words = [
        "--set_seed",
        "--batch_size",
        "2",
        "--device",
        "cpu",
        "--cfg_mode",
        "parallel",
        "--target_size",
        "8",
    ]
    generate("a")
    assert generate("b", *words)[0] == 0
    assert record(tmp_path / "a") == record(tmp_path / "b")
    stored = json.loads((tmp_path / "b" / "generation_configs.json").read_text())
    assert (stored["set_seed"], stored["batch_size"], stored["cfg_mode"]) == (True, 2, "parallel")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target_size", "512"], "--target_size 512"),
        (["--lantern", "--lantern_k", "63"], "--lantern_k 63"),
        (["--draft_top_k", "65"], "65 nodes wide"),
        (["--prompt", "word " * 2000], "prompt"),
        (["--drafter_path", "nowhere"], "nowhere"),
        (["--model_path", "nowhere"], "nowhere"),
        (["--lantern", "--lantern_table", "nowhere"], "--lantern_table nowhere"),
        (["--revision", "main", "--model_path", "configs"], "configs"),
        (["--device_map", "auto"], "it needs two CUDA devices or more"),
        (["--cuda_graphs", "--device", "cpu"], "--cuda_graphs: this runs on the CPU"),
        (["--lantern_kk", "3"], "did you mean --lantern_k"),
        (["--prompt", "none.txt"], "none.txt"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(generate: Run, words: list[str], says: str) -> None:
    status, out, err = generate("o", *words)
    assert (status, out) == (2, "") and says in one_line(err)


def test_damaged_checkpoints(generate: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, copy)
    weights = copy / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, _, err = generate("o", "--model_path", str(copy), *EAGLE.split())
    assert status == 2 and str(weights) in one_line(err)
    assert generate("base", "--model_path", str(copy), "--model_type", "base")[0] == 0
    (copy / "config.json").write_text("{")
    status, _, err = generate("p", "--model_path", str(copy))
    assert status == 2 and "config.json" in one_line(err)


def test_interrupt_and_resume_lose_nothing(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate("whole", "--peanut", "--batch_size", "2", "--heatmaps", "3")[0] == 0
    add, made = RunFolder.add, []

    def stop_at_third(folder: RunFolder, decoded: Any, image: Any, decode_s: float) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(decoded.name)
        add(folder, decoded, image, decode_s)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", stop_at_third)
        status, _, err = generate("parts", "--peanut", "--batch_size", "2", "--heatmaps", "3")
        assert status == 130 and "interrupted" in one_line(err)
    assert sorted(record(tmp_path / "parts")[0]) == sorted(made)
    status, out, _ = generate("parts", "--peanut", "--batch_size", "2", "--heatmaps", "3")
    assert status == 0 and json.loads(out.splitlines()[-1])["skipped"] == 2
    assert record(tmp_path / "parts") == record(tmp_path / "whole")
    for name in ("contact_sheet.png", "heatmap_0.png"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    status, _, err = generate("parts", "--peanut", "--temperature", "0.5")
    assert status == 2 and "temperature" in one_line(err)
    assert record(tmp_path / "parts") == record(tmp_path / "whole")


def test_full_disk_is_one_line(generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.files.os.replace", full)
    status, _, err = generate("o")
    assert status == 2 and "No space left" in one_line(err)


def test_our_own_faults_are_told_apart(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("eval.generate.method_from", broken)
    status, _, err = generate("o")
    assert status == 1 and "internal error: RuntimeError: two lines" in one_line(err)
    with pytest.raises(RuntimeError):
        generate("o", "--debug")


@pytest.mark.parametrize("words", [["generate_image"], ["train_emoji", "dta"], ["bench", "--arms", "adx"]])
def test_unknown_commands_and_choices(run: Run, words: list[str]) -> None:
    status, _, err = run(*words)
    assert status == 2 and words[-1] in one_line(err)


def test_overviews(run: Run) -> None:
    for words in ([], ["--help"], ["train_emoji"], ["train_emoji", "--help"]):
        status, out, err = run(*words)
        assert status == 0 and not err and "tokenizer" in out


def test_controls_bound_drafts(tiny_checkpoint: Path, run: Run, tmp_path: Path) -> None:
    words = "--temperatures 1 --num_images 2 --warmup 0 --depth 3 --draft_top_k 2 --prompt cat".split()
    arms = ["--arms", "floor", "eagle2", "ceiling"]
    status, out, err = run("bench", "--model_path", str(tiny_checkpoint), "--precision", "fp32", *words,
                           *arms, "--output_dir", str(tmp_path))  # fmt: skip
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    rows = {row["arm"]: row for row in result["results"]}
    assert rows["floor"]["tau"] == 1 and rows["ceiling"]["tau"] > 3
    assert 1 <= rows["eagle2"]["tau"] < rows["ceiling"]["tau"]
    assert not rows["floor"]["exact"] and rows["eagle2"]["exact"]
    assert result["roofline"]["read_ms"] > 0


def test_bench(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    status, out, err = run("bench", "--model_path", str(tiny_checkpoint), "--precision", "fp32",
        "--num_images", "2",
                           "--reference", "transformers", "--profile", "--output_dir",
                           str(tmp_path))  # fmt: skip
    assert (status, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "bench.json").read_text())
    assert {"command", "commit", "dirty", "device", "torch", "date", "precision", "weights"} <= set(result)
    rows = {(row["arm"], row["temperature"]): row for row in result["results"]}
    assert len(rows) == 14
    for row in rows.values():
        assert row["SR_95"][0] <= row["SR"] <= row["SR_95"][1] and row["images"] == 2
        assert row["same_image"] == 1 or not row["exact"]
    assert rows["ar", 1.0]["SR"] == 1 and rows["ar", 1.0]["target_calls"] == 15
    assert rows["adt", 0.0]["mean_depth"] > 0 and rows["adt", 0.0]["drafter_calls"] > 0
    for split in result["profile"]:
        assert sum(split[part] for part in ("target", "drafter", "tree", "verify", "host")) == pytest.approx(
            1, abs=1e-3
        )


def test_the_profile_sees_the_drafter_of_the_hybrid(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [
        "--precision",
        "fp32",
        "--num_images",
        "1",
        "--temperatures",
        "1",
        "--arms",
        "hybrid",
        "--profile",
    ]
    status, out, _ = run("bench", "--model_path", str(tiny_checkpoint), *words, "--output_dir", str(tmp_path))
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    shares, cycles = ({row["arm"]: row for row in result[part]} for part in ("profile", "cycles"))
    assert shares["hybrid"]["drafter"] > 0 and shares["ar"]["drafter"] == 0
    assert cycles["hybrid"]["drafter"] > 0 and cycles["ar"]["drafter"] == 0
    for row in cycles.values():
        parts = sum(row[part] for part in ("target", "drafter", "rest"))
        assert row["target"] > 0 and parts == pytest.approx(row["measured"], abs=0.01)
    stored = tmp_path / "bench.json"
    assert run("report", str(stored))[1].count("| ms a cycle") == 1 and result["costs"]["images"] == 1


def test_sweep(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [
        "--betas",
        "0.5",
        "--step_depths",
        "1",
        "--step_widths",
        "0",
        "1",
        "--num_images",
        "1",
        "--warmup",
        "0",
    ]
    status, out, err = run("sweep", "--model_path", str(tiny_checkpoint), "--precision", "fp32", *words,
                           "--output_dir", str(tmp_path))  # fmt: skip
    assert (status, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["points"] == 4
    stored = json.loads((tmp_path / "sweep.json").read_text())["results"]
    assert {row["constants"]["step_width"] for row in stored if row["constants"]} == {0, 1}


def test_sweep_of_self_drafted_trees_loads_no_drafter(
    run: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, copy)
    shutil.rmtree(copy / "drafter")
    grid = "--betas 0.5 --step_depths 1 --step_widths 1 --num_images 1 --warmup 0".split()
    words = ["--model_path", str(copy), "--precision", "fp32", *grid, "--output_dir", str(tmp_path / "o")]
    assert run("sweep", *words, "--drafter_type", "jacobi")[0] == 0
    assert run("sweep", *words, "--drafter_type", "hybrid")[0] == 2
