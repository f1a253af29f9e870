"""report --export_geneval and --export_dpg: the folders have the names that the scorers of these benchmarks
read, nothing is overwritten, and a run that is not whole gives no folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Refused, Run
from tests.storage.conftest import DPG, GENEVAL
from tests.support.checkpoints import Checkpoints

SIDE = 8  # pixels of an image of the tiny checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by their paths in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_geneval_has_a_folder_for_each_line(folder: Path, run: Run) -> None:
    status, out, _ = run("report", "geneval", "--export_geneval", "new/out")
    assert status == 0 and "evaluate_images.py new/out" in out
    expected = {f"{number:05}/metadata.jsonl": f"{line}\n".encode() for number, line in enumerate(GENEVAL)}
    for prompt, images in (("00000", ("0", "0.1", "0.2", "0.3")), ("00001", ("1", "1.1", "1.2", "1.3"))):
        for sample, name in enumerate(images):
            image = folder / "geneval" / "img" / f"{name}.png"
            expected[f"{prompt}/samples/{sample:04}.png"] = image.read_bytes()
    assert contents(folder / "new" / "out") == expected
    assert len(set(expected.values())) == len(expected)  # the seeds differ
    assert "all 8 images" in run("report", "geneval", "--check")[1]


def test_dpg_has_a_square_of_four_images_for_each_prompt(folder: Path, run: Run) -> None:
    status, out, _ = run("report", "dpg", "--export_dpg", "out")
    assert status == 0 and f"--image-root-path out --pic-num 4 --resolution {SIDE}\n" in out
    assert set(contents(folder / "out")) == {f"{name}.png" for name in DPG}
    crops = [(0, 0), (SIDE, 0), (0, SIDE), (SIDE, SIDE)]  # in the order in which the scorer cuts them
    for name in DPG:
        square = Image.open(folder / "out" / f"{name}.png")
        assert (square.mode, square.size) == ("RGB", (2 * SIDE, 2 * SIDE))
        for (left, top), image in zip(crops, ("", ".1", ".2", ".3"), strict=True):
            single = Image.open(folder / "dpg" / "img" / f"{name}{image}.png").convert("RGB")
            assert square.crop((left, top, left + SIDE, top + SIDE)).tobytes() == single.tobytes()


@pytest.mark.parametrize("name", ["geneval", "dpg"])
def test_nothing_is_overwritten(name: str, folder: Path, run: Run, refused: Refused) -> None:
    words = ("report", name, f"--export_{name}", "out")
    assert run(*words)[0] == 0
    whole = contents(folder / "out")
    assert "out is not empty" in refused(*words)
    assert contents(folder / "out") == whole


def narrow(path: Path) -> None:
    """Makes an image half as wide."""
    Image.new("RGB", (SIDE // 2, SIDE)).save(path)


LOST = "lacks {} of {} images ({}"
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("geneval", lambda f: (f / "geneval.jsonl").unlink(), "its prompts, --prompt geneval.jsonl, are no"),
    ("geneval", lambda f: (f / "geneval.jsonl").write_text("\n".join(GENEVAL[::-1])),
     "made from another prompt"),
    ("geneval", lambda f: (f / "geneval/img/1.3.png").write_bytes(b"x"), "img/1.3.png: is damaged"),
    ("geneval", lambda f: (f / "out").write_text(""), "out: a file or a link to nothing"),
    ("dpg", lambda f: (f / "texts/new.txt").write_text("a dog"), LOST.format(4, 12, "new.png, ")),
    ("dpg", lambda f: narrow(f / "dpg/img/COCOval12.3.png"),
     "dpg has images of [(4, 8), (8, 8)] pixels: "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "says"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_run_that_does_not_fit_gives_no_folder(
    name: str, spoil: Callable[[Path], object], says: str, folder: Path, refused: Refused
) -> None:
    spoil(folder)
    assert says in refused("report", name, f"--export_{name}", "out")
    assert not (folder / "out").is_dir() or not contents(folder / "out")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("geneval dpg --export_geneval out", "--export_geneval out: give one folder"),
        ("geneval --export_dpg out", "geneval.jsonl: make the run with --prompt dpg_bench/prompts"),
        ("dpg --export_geneval out", "texts: make the run with --prompt evaluation_metadata.jsonl"),
        ("texts --export_dpg out", "texts/generation_configs.json"),
        ("dpg --export_dpg out --export_geneval out", "it does not go with --export_geneval"),
        ("dpg --export_dpg dpg", "dpg is not empty"),
    ],
)
def test_what_is_no_run_of_the_benchmark_is_refused(
    words: str, says: str, folder: Path, refused: Refused
) -> None:
    assert says in refused("report", *words.split())
    assert not (folder / "out").exists()


def test_a_run_of_some_prompts_is_completed_by_the_command_that_the_error_names(
    folder: Path, checkpoints: Checkpoints, run: Run, refused: Refused
) -> None:
    """Images that are there are not made again, whatever part of the prompts the last command made."""
    words = ["generate_images", *checkpoints["emoji"].words(), "--prompt", "geneval.jsonl", "--method", "ar"]
    assert run(*words, "--num_images", 1, "--output_dir", "some")[0] == 0
    assert LOST.format(7, 8, "") in refused("report", "some", "--export_geneval", "out")
    status, out, _ = run(*words, "--num_images", -1, "--images_per_prompt", 4, "--output_dir", "some")
    assert status == 0 and json.loads(out.splitlines()[-1])["skipped"] == 1
    assert run(*words, "--slice", "0-1", "--output_dir", "some")[0] == 0
    for name in ("some", "geneval"):
        assert run("report", name, "--export_geneval", f"out_{name}")[0] == 0
    assert contents(folder / "out_some") == contents(folder / "out_geneval")
