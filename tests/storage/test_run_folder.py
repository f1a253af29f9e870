"""The folder of a run: file names, records, resumption, results, and the maps made from them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.records import Decoded, Step
from eval.figures import contact_sheet, heatmap
from models.checkpoint.files import (
    append_json,
    read_json_lines,
    replacing,
    write_atomic,
    write_json,
)
from storage.prompts import Prompt, image_seed
from storage.run_folder import RunFolder, file_name, read_records, read_statistics
from tests.support.runs import images

OUTSIDE = "../../x/y"
PROMPTS = [
    Prompt("0", "a", 0, (("category", "Animals"),)), Prompt("1", "b", 1), Prompt("2", "c", 2),
    Prompt(OUTSIDE, "d", None),
]  # fmt: skip
NAMES = [prompt.name for prompt in PROMPTS]
STEPS = [
    {"position": 1, "accepted": 1, "depth": 2, "width": 4},
    {"position": 3, "accepted": 0, "depth": 1, "width": 3},
]
SETTINGS = {"temperature": 1.0, "adt": {"beta": 0.5}, "random_seed": 3}
GRID = Grid(2, 2)


def opened(root: Path, settings: dict[str, Any] | None = None, prompts: list[Prompt] = PROMPTS) -> RunFolder:
    """Opens the folder of a run for writing."""
    folder = RunFolder(root, prompts, settings or SETTINGS, GRID)
    folder.forget_damaged(folder.prompts)
    folder.start({"output_dir": str(root)})
    return folder


def add(folder: RunFolder, *names: str) -> None:
    """Stores the codes of 2 x 2 images, each generated in two steps."""
    for name in names:
        steps = [Step(1, 0, 1, 2, 3, 6, 1, 1.0), Step(3, 1, 1, 1, 3, 3, 0, 1.0)]
        codes = [1, 2, 3, 0]
        folder.add(Decoded(name, image_seed(3, name), codes, steps, 0.5, target_calls=2, drafter_calls=3))


def finish(folder: RunFolder, *names: str) -> None:
    """Stores codes and pixels."""
    add(folder, *names)
    for name in names:
        folder.finish(folder.read(name), Image.new("RGB", (4, 4)), 0.1)


def test_file_names_are_safe_and_distinct() -> None:
    assert file_name("12") == "12" and file_name("a-b_c.d") == "a-b_c.d"
    assert "." not in file_name(".") + file_name("..")
    odd = ["../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a b", "ü" * 5, "x" * 10_000, "x" * 9_999,
           ".hidden", "-rf", "a\0b", "nul\n", "\ud800"]  # fmt: skip
    safe = [file_name(name) for name in odd]
    assert len(set(safe)) == len(odd)
    for name in safe:
        assert "/" not in name and "\\" not in name and len(name) < 120 and not name.startswith((".", "-"))


def test_colliding_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'A' and 'a'.* a\.png"):
        RunFolder(tmp_path, [Prompt("A", "x", None), Prompt("a", "y", None)], SETTINGS, GRID)


def test_what_is_not_written_whole_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_atomic(path, b"old")
    with pytest.raises(OSError, match=r"No space left on device: .*f\.json"), replacing(path) as part:
        part.write_bytes(b"new")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_files_have_the_usual_permissions_where_a_disk_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", b"")
        with replacing(tmp_path / "b") as part:
            save_file({}, part)  # makes another file, which only its owner can read
    finally:
        os.umask(usual)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o640}

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", forbidden)
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_every_error_of_writing_names_its_file(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "f"
    for write in (lambda: write_atomic(nowhere, b""), lambda: append_json(nowhere, {})):
        with pytest.raises(OSError, match="nowhere"):
            write()


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path, "") == []
    for number in range(2):
        append_json(path, {"n": number, "text": "ü\u2028\n\ud800"})
    assert [(entry["n"], entry["text"]) for entry in read_json_lines(path, "")] == [
        (number, "ü\u2028\n\ud800") for number in range(2)
    ]
    path.write_text('{"n": 1}\n{"n":\n{"n": 3}\n')
    with pytest.raises(UserError, match=r"lines\.jsonl.*remove it"):
        read_json_lines(path, "remove it")


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path, numbers = tmp_path / "lines.jsonl", range(100)
    processes = []
    for writer in range(3):
        processes.append(os.fork())
        if not processes[-1]:
            for number in numbers:
                append_json(path, {"writer": writer, "number": number, "text": "x" * 9000})
            os._exit(0)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0, 0]
    entries = read_json_lines(path, "")
    for writer in range(3):
        assert [entry["number"] for entry in entries if entry["writer"] == writer] == [*numbers]


@pytest.mark.parametrize("text", ["ü", "\ud800", "a\udcffb", '"\\\n'])
def test_any_text_is_written_as_json_and_read_back(tmp_path: Path, text: str) -> None:
    write_json(tmp_path / "f.json", {text: text})
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8")) == {text: text}


def test_resumption_takes_over_whole_images_only(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "c"
    folder = opened(root)
    finish(folder, *NAMES)
    assert folder.complete
    whole = read_statistics(root), images(root)
    folder.png("1").unlink()
    folder.png(OUTSIDE).unlink()
    folder.record_path("2").unlink()
    again = opened(root)
    assert [name for name in NAMES if again.is_finished(name)] == ["0"] and not again.complete
    assert [name for name in NAMES if again.has_record(name)] == ["0", "1", OUTSIDE]
    assert list(read_statistics(root)) == [stored.name for stored in read_records(root)] == ["0"]
    finish(again, "2", "1")  # the images finish in any order from here on
    entry = read_statistics(root)["0"]
    assert entry["acceptance_length"] == entry["step_compression"] == 1.5
    assert (entry["latency"], entry["time"], entry["ann_id"]) == (0.5, 0.6, 0)
    assert (entry["mean_depth"], entry["mean_nodes"], entry["category"]) == (1.5, 4.5, "Animals")
    assert list(read_statistics(root)) == ["0", "1", "2"]
    finish(again, OUTSIDE)
    assert list(again.statistics()) == list(read_statistics(root)) == NAMES
    assert again.complete and (read_statistics(root), images(root)) == whole
    assert all(path.is_dir() or root in path.parents for path in tmp_path.rglob("*"))


def test_a_record_holds_codes_before_there_are_pixels(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    add(folder, "0")
    stored = json.loads((tmp_path / "records" / "0.json").read_text())
    assert stored["codes"] == [1, 2, 3, 0]
    assert [step["accepted"] for step in stored["steps"]] == [1, 0]
    assert folder.has_record("0") and not folder.is_finished("0")
    finish(folder, "1")
    assert [stored.name for stored in read_records(tmp_path)] == ["1"]


def test_other_runs_are_refused_and_damage_is_forgotten(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(UserError, match=r"temperature.* 1\.0.* 0\.0"):
        opened(tmp_path, {**SETTINGS, "temperature": 0.0})
    finish(folder, "0")
    path, png = folder.record_path("0"), folder.png("0")
    whole, pixels = path.read_text(), png.read_bytes()
    for bad in (b'{"name": "0"}', b"\xff\xfe", b"[" * 100_000,
                whole.replace('"codes": [', '"codes": ["x", ').encode(),
                whole.replace('"prompt": "a"', '"prompt": 5').encode()):  # fmt: skip
        path.write_bytes(bad)
        again = opened(tmp_path)
        assert not again.has_record("0") and path.read_bytes() == bad
        finish(again, "0")
        assert again.is_finished("0") and path.read_text() == whole
    for cut in (pixels[:-9], bytes(len(pixels))):
        png.write_bytes(cut)
        again = opened(tmp_path)
        assert again.has_record("0") and not again.is_finished("0")
        again.finish(again.read("0"), Image.new("RGB", (4, 4)), 0.1)
        assert again.is_finished("0") and png.read_bytes() == pixels
    with pytest.raises(UserError, match=f"{path}: .*another prompt, 'a'"):
        opened(tmp_path, prompts=[Prompt("0", "other", 0)])
    path.write_text(whole.replace('"run": "', '"run": "0'))
    with pytest.raises(UserError, match=str(path)):
        opened(tmp_path)
    (tmp_path / "generation_configs.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{tmp_path}: .*generation_configs\.json"):
        opened(tmp_path)


def test_a_folder_of_the_released_code_is_read_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    stored = {"generation_configs.json": '{"temperature": 1.0}',
              "global_statistics_0_10.json": '{"0": {"prompt": "a", "step_compression": 3}}'}  # fmt: skip
    for name, content in stored.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"output_dir {tmp_path}: "):
        opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*stored, "img"}
    assert read_statistics(tmp_path)["0"]["step_compression"] == 3


def test_figures_show_any_prompt_and_mark_held_out_ones(tmp_path: Path) -> None:
    picture, plain, marked = (tmp_path / name for name in ("p.png", "plain.png", "marked.png"))
    Image.new("RGB", (8, 8), "red").save(picture)
    pictures = [(picture, "a very long prompt " * 20), (picture, "w" * 300)]
    contact_sheet(pictures, [], plain)
    contact_sheet(pictures, ["w" * 300], marked)
    assert plain.read_bytes() != marked.read_bytes()
    tall = tmp_path / "tall.png"
    Image.new("RGB", (100, 400), "red").save(tall)
    contact_sheet([(tall, "sun")], [], plain)
    assert Image.open(plain).size == (420, 454)  # a square of 400, so that its caption is not covered
    heatmap(picture, "costs $5 and $6", STEPS, Grid(2, 2), tmp_path / "heat.png")
    Image.open(tmp_path / "heat.png").verify()
