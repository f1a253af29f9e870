"""A run's folder: safe names, whole files, resumption, maps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from adt_tree.errors import UserError
from adt_tree.records import Decoded, Step
from eval.figures import contact_sheet, heatmap
from eval.runs import run_folder
from eval.runs.locks import alone
from eval.runs.prompts import Prompt
from eval.runs.run_folder import RunFolder, file_name, read_steps, write_atomic
from models.checkpoint.files import replacing
from tests.runs import record

OUT = "../../x/y"
PROMPTS = [
    Prompt("0", "a", 0, (("category", "Animals"),)), Prompt("1", "b", 1), Prompt("2", "c", 2),
    Prompt(OUT, "d", None),
]  # fmt: skip
STEPS = [
    {"position": 1, "accepted": 1, "depth": 2, "width": 4},
    {"position": 3, "accepted": 0, "depth": 1, "width": 3},
]
SETTINGS = {"temperature": 1.0, "adt": {"beta": 0.5}}


def decoded(name: str) -> Decoded:
    """A 2 x 2 image made in two steps."""
    steps = [Step(1, 0, 1, 2, 3, 6, 1, 1.0), Step(3, 1, 1, 1, 3, 3, 0, 1.0)]
    return Decoded(name, 7, [1, 2, 3, 0], steps, seconds=0.5, target_calls=2, drafter_calls=3)


def opened(root: Path, settings: dict | None = None) -> RunFolder:
    """The folder of a run over PROMPTS."""
    folder = RunFolder(root, (0, 10), PROMPTS, settings or SETTINGS)
    folder.start({"output_dir": str(root)})
    return folder


def finish(folder: RunFolder, *names: str) -> None:
    for name in names:
        folder.add(decoded(name), Image.new("RGB", (4, 4)), 0.1)


def test_file_names_are_safe_and_distinct() -> None:
    assert file_name("12") == "12" and file_name("a-b_c.d") == "a-b_c.d"
    assert "." not in file_name(".") + file_name("..")
    odd = ["../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a b", "ü" * 5, "x" * 10_000, "x" * 9_999,
           ".hidden", "-rf", "a\0b", "nul\n"]  # fmt: skip
    safe = [file_name(name) for name in odd]
    assert len(set(safe)) == len(odd)
    for name in safe:
        assert "/" not in name and "\\" not in name and len(name) < 120 and not name.startswith((".", "-"))


def test_colliding_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="same file"):
        RunFolder(tmp_path, (0, 1), [Prompt("A", "x", None), Prompt("a", "y", None)], SETTINGS)


def test_what_is_not_written_whole_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_atomic(path, b"old")
    with pytest.raises(OSError, match=r"No space left on device: .*f\.json"), replacing(path) as part:
        part.write_bytes(b"new")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_resume_takes_over_finished_images_only(tmp_path: Path) -> None:
    """Lines of steps that are torn or no text, and other windows', do not harm; those stay as they are."""
    root = tmp_path / "a" / "b" / "c"
    folder, names = opened(root), ["0", "1", "2", OUT]
    finish(folder, *names)
    assert folder.merge()
    whole = record(root)
    folder.png("1").unlink()
    folder.png("2").write_bytes(b"")
    folder.png(OUT).write_bytes(folder.png(OUT).read_bytes()[:-1])
    other, steps = b'{"name": "of another window \xff"}\n', folder.steps_path.read_bytes()
    folder.steps_path.write_bytes(other + b"17\n" + steps + b'{"name": "0", "posi')
    assert [len(own) for own in read_steps(folder.steps_path, names).values()] == [2] * 4
    again = opened(root)
    assert list(again.finished()) == ["0"] and not any(map(again.done, names[1:]))
    again.merge()
    first = b"".join(line for line in steps.splitlines(keepends=True) if json.loads(line)["name"] == "0")
    assert again.steps_path.read_bytes() == other + first
    entry = again.finished()["0"]
    assert entry["acceptance_length"] == entry["step_compression"] == 1.5
    assert (entry["latency"], entry["time"], entry["ann_id"], entry["seed"]) == (0.5, 0.6, 0, 7)
    assert (entry["mean_depth"], entry["mean_nodes"], entry["category"]) == (1.5, 4.5, "Animals")
    finish(again, *names[1:])
    assert again.merge() and record(root) == whole and again.steps_path.read_bytes() == other + steps
    assert all(path.is_dir() or root in path.parents for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("step", ["write_atomic", "write_json"])
def test_a_merge_that_is_interrupted_or_refused_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = opened(tmp_path)
    finish(folder, "0")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.merge()
    again = opened(tmp_path)
    assert again.done("0")
    finish(again, "1")
    record = tmp_path / "queue" / "1.json"
    record.write_text("{")
    with pytest.raises(UserError, match=r"1\.json is damaged"):
        again.merge()
    record.unlink()
    again.merge()
    assert list(json.loads(again.statistics_path.read_text())) == ["0"]
    assert len(again.steps_path.read_text().splitlines()) == 2


def test_other_configurations_and_damage_are_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(UserError, match="temperature = 1.0, now it is 0.0"):
        opened(tmp_path, {**SETTINGS, "temperature": 0.0})
    for bad in (b"{", b"[]", b'{"0": 1}', b"\xff\xfe", b""):
        folder.statistics_path.write_bytes(bad)
        with pytest.raises(UserError, match=rf"{folder.statistics_path} is damaged"):
            opened(tmp_path)
        assert folder.statistics_path.read_bytes() == bad
    folder.statistics_path.write_text(json.dumps({"0": {"prompt": "other"}}))
    with pytest.raises(UserError, match="another prompt"):
        opened(tmp_path)
    (tmp_path / "generation_configs.json").write_text("{}")
    with pytest.raises(UserError, match="another program"):
        opened(tmp_path)
    with pytest.raises(UserError, match="it is a file"):
        opened(folder.statistics_path)


def test_figures_bear_any_prompt_and_mark_those_held_out(tmp_path: Path) -> None:
    picture, plain, marked = (tmp_path / name for name in ("p.png", "plain.png", "marked.png"))
    Image.new("RGB", (8, 8), "red").save(picture)
    pictures = [(picture, "a very long prompt " * 20), (picture, "w" * 300)]
    contact_sheet(pictures, [], plain)
    contact_sheet(pictures, ["w" * 300], marked)
    assert plain.read_bytes() != marked.read_bytes()
    heatmap(picture, "costs $5 and $6", STEPS, (2, 2), tmp_path / "heat.png")


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, what: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(UserError, match="cannot be locked .Operation not supported.; choose an --output_dir"):
        alone(tmp_path / "f")
