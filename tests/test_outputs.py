"""A run's folder: safe names, whole files, resumption, maps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from adt_tree.records import Decoded, Step
from eval import outputs
from eval.errors import UserError
from eval.figures import contact_sheet, heatmap, maps
from eval.outputs import RunFolder, file_name, write_atomic
from eval.prompts import Prompt

PROMPTS = [Prompt("0", "a", 0, (("category", "Animals"),)), Prompt("1", "b", 1), Prompt("x/y", "c", None)]
STEPS = [
    {"position": 1, "accepted": 1, "depth": 2, "width": 4},
    {"position": 3, "accepted": 0, "depth": 1, "width": 3},
]
SETTINGS = {"temperature": 1.0, "adt": {"beta": 0.5}}


def decoded(name: str) -> Decoded:
    """A 2 x 2 image made in two cycles."""
    steps = [Step(1, 0, 1, 2, 3, 6, 1, 1.0), Step(3, 1, 1, 1, 3, 3, 0, 1.0)]
    return Decoded(name, 7, [1, 2, 3, 0], steps, seconds=0.5, target_calls=2, drafter_calls=3)


def opened(root: Path, settings: dict | None = None) -> RunFolder:
    """The folder of a run over PROMPTS."""
    folder = RunFolder(root, (0, 10), PROMPTS)
    folder.open(settings or SETTINGS, {"output_dir": str(root)})
    return folder


def test_file_names_are_safe_and_distinct() -> None:
    assert file_name("12") == "12" and file_name("a-b_c.d") == "a-b_c.d"
    odd = [
        "../../etc/passwd",
        "a/b",
        "a\\b",
        "a b",
        "ü" * 5,
        "x" * 10_000,
        "x" * 9_999,
        ".hidden",
        "-rf",
        "a\0b",
        "nul\n",
    ]
    safe = [file_name(name) for name in odd]
    assert len(set(safe)) == len(odd)
    for name in safe:
        assert "/" not in name and "\\" not in name and len(name) < 120 and not name.startswith((".", "-"))


def test_colliding_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="same file"):
        RunFolder(tmp_path, (0, 1), [Prompt("A", "x", None), Prompt("a", "y", None)])


def test_atomic_write_leaves_the_old_file_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.json"
    write_atomic(path, b"old")

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.files.os.replace", full)
    with pytest.raises(OSError, match=r"No space left on device: .*f\.json"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_resume_takes_over_finished_images_only(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for name in ("0", "1"):
        folder.add(decoded(name), Image.new("RGB", (4, 4)), 0.1)
    folder.merge()
    folder.png("1").unlink()
    with folder.steps_path.open("a") as stream:
        stream.write('{"name": "x/y", "position": 1}\n{"name": "0", "posi')
    again = opened(tmp_path)
    assert list(again.finished()) == ["0"]
    names = [json.loads(line)["name"] for line in again.steps_path.read_text().splitlines()]
    assert names == ["0", "0"]
    entry = again.finished()["0"]
    assert entry["acceptance_length"] == entry["step_compression"] == 1.5
    assert (entry["latency"], entry["time"], entry["ann_id"], entry["seed"]) == (0.5, 0.6, 0, 7)
    assert (entry["mean_depth"], entry["mean_nodes"], entry["category"]) == (1.5, 4.5, "Animals")


def test_statistics_are_there_while_images_are_made(tmp_path: Path) -> None:
    """gather() shows what is finished; the records stay, so that the last merge still tells who ended it."""
    folder = opened(tmp_path)
    for number, prompt in enumerate(PROMPTS, start=1):
        assert folder.take(prompt.name)
        folder.add(decoded(prompt.name), Image.new("RGB", (2, 2)), 0.0)
        folder.gather()
        assert len(json.loads(folder.statistics_path.read_text())) == number
        assert len(folder.steps_path.read_text().splitlines()) == 2 * number
    before = folder.statistics_path.read_bytes(), folder.steps_path.read_bytes()
    assert folder.merge() and not (tmp_path / "queue").exists()
    assert (folder.statistics_path.read_bytes(), folder.steps_path.read_bytes()) == before
    assert not folder.merge()


def test_a_merge_that_is_interrupted_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    assert folder.take("0")
    folder.add(decoded("0"), Image.new("RGB", (2, 2)), 0.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.gather()
    folder.merge()
    assert list(json.loads(folder.statistics_path.read_text())) == ["0"]
    assert len(folder.steps_path.read_text().splitlines()) == 2


def test_other_configurations_and_damage_are_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(UserError, match="temperature = 1.0, now it is 0.0"):
        opened(tmp_path, {**SETTINGS, "temperature": 0.0})
    folder.statistics_path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        opened(tmp_path)
    folder.statistics_path.write_text(json.dumps({"0": {"prompt": "other"}}))
    with pytest.raises(UserError, match="another prompt"):
        opened(tmp_path)
    (tmp_path / "generation_configs.json").write_text("{}")
    with pytest.raises(UserError, match="another program"):
        opened(tmp_path)
    with pytest.raises(UserError, match="it is a file"):
        opened(folder.statistics_path)


def test_maps() -> None:
    committed, depth, width = maps(STEPS, 2, 2).values()
    assert math.isnan(committed[0][0]) and committed[0][1:] + committed[1] == [2, 2, 1]
    assert depth[0][1:] + depth[1] == [2, 2, 1] and width[0][1:] + width[1] == [4, 4, 3]


def test_figures_are_deterministic(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    Image.new("RGB", (8, 8), "red").save(picture)
    for turn in ("a", "b"):
        pictures = [(picture, "a very long prompt " * 20), (picture, "w" * 300)]
        contact_sheet(pictures, [], tmp_path / f"{turn}.sheet.png")
        heatmap(picture, "costs $5 and $6", STEPS, (2, 2), tmp_path / f"{turn}.heat.png")
    assert (tmp_path / "a.sheet.png").read_bytes() == (tmp_path / "b.sheet.png").read_bytes()
    contact_sheet(pictures, ["w" * 300], tmp_path / "marked.png")
    assert (tmp_path / "a.sheet.png").read_bytes() != (tmp_path / "marked.png").read_bytes()
    assert (tmp_path / "a.heat.png").read_bytes() == (tmp_path / "b.heat.png").read_bytes()
