"""The command from outside: errors, outputs, resumption; no option is swallowed. Tiny random checkpoint."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.outputs import RunFolder
from tests.conftest import Run
from tests.runs import record

ROOT = Path(__file__).resolve().parent.parent


def one_line(err: str) -> str:
    """The single line of stderr."""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


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
        (["--cuda_graphs", "--device", "cpu"], "--cuda_graphs: this runs on the CPU"),
        (["--lantern_kk", "3"], "did you mean --lantern_k"),
        (["--prompt", "none.txt"], "none.txt"),
        (["--prompt", "caf\udce9"], "not UTF-8 text"),
        (["--output_dir", ""], "--output_dir: it is empty"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_leaves_no_folder(
    generate: Run, tmp_path: Path, words: list[str], says: str
) -> None:
    status, out, err = generate("o", *EAGLE.split(), *words)
    assert (status, out) == (2, "") and says in one_line(err) and len(err) < 500
    assert not (tmp_path / "o").exists()


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


@pytest.mark.parametrize("left", [0, 40])
def test_a_truncated_image_of_a_finished_run_is_made_again(generate: Run, tmp_path: Path, left: int) -> None:
    assert generate("o")[0] == 0
    whole = record(tmp_path / "o")
    picture = tmp_path / "o" / "img" / "1.png"
    picture.write_bytes(picture.read_bytes()[:left])
    status, out, err = generate("o")
    assert (status, err) == (0, "") and json.loads(out.splitlines()[-1])["skipped"] == 4
    assert record(tmp_path / "o") == whole


def test_our_own_faults_are_told_apart(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("cli.generate_images.method_from", broken)
    status, _, err = generate("o")
    assert status == 1 and "internal error: RuntimeError: two lines" in one_line(err)
    with pytest.raises(RuntimeError):
        generate("o", "--debug")


@pytest.mark.parametrize(
    "words", [["generate_image"], ["train_emoji", "dta"], ["memory", "--precision", "int3"], ["memory", "x1"]]
)
def test_unknown_commands_and_choices(run: Run, words: list[str]) -> None:
    status, _, err = run(*words)
    assert status == 2 and words[-1] in one_line(err)


def test_overviews(run: Run) -> None:
    for words in ([], ["--help"], ["train_emoji"], ["train_emoji", "--help"]):
        status, out, err = run(*words)
        assert status == 0 and not err and "tokenizer" in out
