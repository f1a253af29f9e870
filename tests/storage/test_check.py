"""report --check: every missing or damaged file of a run is named, and a complete run passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.published import edit


def test_complete_runs_pass_in_one_line_each(folder: Path, run: Run) -> None:
    status, out, err = run("report", folder / "geneval", folder / "dpg", "--check")
    assert (status, err) == (0, "") and out.count("\n") == 2
    assert all(str(folder) in line and "8 images" in line for line in out.splitlines())


def cut_off(record: dict[str, Any]) -> None:
    """Removes the last step and its codes."""
    accepted = record["steps"].pop()["accepted"]
    del record["codes"][-accepted - 1 :]


RECORD, PNG = "geneval/records/1.json", "geneval/img/1.3.png"
DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no record": (RECORD, Path.unlink),
    "no pixels": (PNG, Path.unlink),
    "half a record": (RECORD, lambda path: path.write_bytes(path.read_bytes()[:99])),
    "half the pixels": (PNG, lambda path: path.write_bytes(path.read_bytes()[:99])),
    "no content": (PNG, lambda path: path.write_bytes(b"")),
    "a code too few": (RECORD, lambda path: edit(path, lambda record: record["codes"].pop())),
    "a step too few": (RECORD, lambda path: edit(path, lambda record: record["steps"].pop(3))),
    "a record cut off": (RECORD, lambda path: edit(path, cut_off)),
    "another seed": (RECORD, lambda path: edit(path, lambda record: record["statistics"].update(seed=1))),
    "another prompt": (
        RECORD,
        lambda path: edit(path, lambda record: record["statistics"].update(prompt="dog")),
    ),
    "another run": (RECORD, lambda path: edit(path, lambda record: record.update(run="0"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_damaged_is_named(damage: str, folder: Path, run: Run) -> None:
    file, spoil = DAMAGES[damage]
    spoil(folder / file)
    status, out, _ = run("report", folder / "geneval", "--check")
    assert status == 1 and out.startswith(f"{folder / file}: ") and out.count("\n") == 1


def test_every_byte_of_the_pixels_counts(folder: Path, run: Run) -> None:
    whole = (folder / PNG).read_bytes()
    for place in (3, 20, len(whole) // 2, len(whole) - 14):
        (folder / PNG).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        status, out, _ = run("report", folder / "geneval", "--check")
        assert status == 1 and str(folder / PNG) in out, place


@pytest.mark.parametrize("method", ["zipar", "pjd", "self-draft"])
def test_runs_of_every_order_of_cells_pass(
    method: str, checkpoints: Checkpoints, tmp_path: Path, run: Run
) -> None:
    words = [*checkpoints["emoji"].words(), "--prompt", "sun", "--num_images", 1, "--heatmaps", 0]
    assert run("generate_images", *words, "--method", method, "--output_dir", tmp_path)[0] == 0
    assert run("report", tmp_path, "--check")[0] == 0


def test_all_faults_are_named_at_once(folder: Path, run: Run) -> None:
    files = ("geneval/records/0.json", "geneval/img/0.png", RECORD, PNG)
    for file in files:
        (folder / file).unlink()
    status, out, _ = run("report", folder / "geneval", folder / "dpg", "--check")
    named = [line.split(": ")[0] for line in out.splitlines()]
    assert status == 1 and named == [str(folder / file) for file in (*files, "dpg")]


def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, refused: Refused) -> None:
    assert "generation_configs.json" in refused("report", tmp_path, "--check")
    assert "RESULT" in refused("report", "--check")
    assert "--check" in refused("report", folder / "geneval", "--check", "--write", tmp_path / "x.md")
    assert "--paper" in refused("report", folder / "geneval", "--check", "--paper", "coco")
    settings = folder / "geneval" / "generation_configs.json"
    edit(settings, lambda options: options.pop("start_idx"))
    assert str(settings) in refused("report", folder / "geneval", "--check")
    edit(settings, lambda options: options.update(start_idx=0, prompt=str(tmp_path / "gone.txt")))
    assert "gone.txt" in refused("report", folder / "geneval", "--check")
