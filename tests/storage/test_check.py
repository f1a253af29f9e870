"""report --check: every missing or damaged file of a run is named, and a complete run passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import main
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.published import edit

PROMPTS = ["red heart", "pizza", "cat"]


@pytest.fixture(scope="module")
def finished(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a complete run of three prompts."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    words = [*checkpoints["emoji"].words(), "--prompt", str(folder / "prompts.txt"), "--heatmaps", "0"]
    assert main.main(["generate_images", *words, "--method", "ar", "--output_dir", str(folder / "o")]) == 0
    return folder / "o"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of that folder, which a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "o"))


def test_complete_runs_pass_in_one_line_each(finished: Path, run: Run) -> None:
    status, out, err = run("report", finished, finished, "--check")
    assert (status, err) == (0, "") and out.count("\n") == 2
    assert all(str(finished) in line and "3 images" in line for line in out.splitlines())


def cut_off(record: dict[str, Any]) -> None:
    """Removes the last step and its codes."""
    accepted = record["steps"].pop()["accepted"]
    del record["codes"][-accepted - 1 :]


RECORD, PNG = "records/1.json", "img/2.png"
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
    status, out, _ = run("report", folder, "--check")
    assert status == 1 and out.startswith(f"{folder / file}: ") and out.count("\n") == 1


def test_every_byte_of_the_pixels_counts(folder: Path, run: Run) -> None:
    whole = (folder / PNG).read_bytes()
    for place in (3, 20, len(whole) // 2, len(whole) - 14):
        (folder / PNG).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        status, out, _ = run("report", folder, "--check")
        assert status == 1 and str(folder / PNG) in out, place


@pytest.mark.parametrize("method", ["zipar", "pjd", "self-draft"])
def test_runs_of_every_order_of_cells_pass(
    method: str, checkpoints: Checkpoints, tmp_path: Path, run: Run
) -> None:
    words = [*checkpoints["emoji"].words(), "--prompt", "sun", "--num_images", 1, "--heatmaps", 0]
    assert run("generate_images", *words, "--method", method, "--output_dir", tmp_path)[0] == 0
    assert run("report", tmp_path, "--check")[0] == 0


def test_all_faults_are_named_at_once(folder: Path, finished: Path, run: Run) -> None:
    for file in ("records/0.json", "img/0.png", RECORD, PNG):
        (folder / file).unlink()
    status, out, _ = run("report", folder, finished, "--check")
    named = [line.split(": ")[0] for line in out.splitlines()]
    assert status == 1 and named == [
        *(str(folder / file) for file in ("records/0.json", "img/0.png", RECORD, PNG)),
        str(finished),
    ]


def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, refused: Refused) -> None:
    assert "generation_configs.json" in refused("report", tmp_path, "--check")
    assert "RESULT" in refused("report", "--check")
    assert "--check" in refused("report", folder, "--check", "--write", tmp_path / "x.md")
    assert "--paper" in refused("report", folder, "--check", "--paper", "coco")
    settings = folder / "generation_configs.json"
    edit(settings, lambda options: options.pop("start_idx"))
    assert str(settings) in refused("report", folder, "--check")
    edit(settings, lambda options: options.update(start_idx=0, prompt=str(tmp_path / "gone.txt")))
    assert "gone.txt" in refused("report", folder, "--check")
