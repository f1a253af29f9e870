"""The page of a report, and the maps of acceptance: from runs of the tiny model, self-contained."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import main
from eval.acceptance import correlation, grid_of
from eval.errors import UserError
from eval.paper import PAPER, cells
from tests.test_report import RESULT, ROW
from tests.tiny import tiny_words

NAN = math.nan
VOID = ("meta", "link", "img")


class Tags(HTMLParser):
    """Every tag is closed; every address is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)
        assert tag not in ("script", "iframe", "object"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> Tags:
    """A page, taken apart."""
    tags = Tags()
    page = path.read_text(encoding="utf-8")
    tags.feed(page)
    assert not tags.open and all(address.startswith("data:") for address in tags.addresses)
    assert not re.search(r"https?://|url\(|@import", page)
    return tags


@pytest.fixture(scope="module")
def runs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: plain, adaptive (the same images), and relaxed."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "p.txt"
    prompts.write_text('red heart\n<b>pizza & "wine"</b>\ncat\n')
    fixed = tiny_words(tiny_checkpoint, prompts, heatmaps=1)
    for name, words in {
        "ar": "--model_type base", "adt": "--drafter_type eagle --peanut",
        "relaxed": "--drafter_type eagle --lantern --lantern_delta 0.9",
    }.items():  # fmt: skip
        assert main.main(["generate_images", *fixed, *words.split(), "--output_dir", str(folder / name)]) == 0
    return folder


def test_acceptance_averages_over_images(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(runs / name) for name in ("adt", "relaxed")]
    assert main.main(["acceptance", *folders, "--output_dir", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == 2
    first, second = json.loads((tmp_path / "a" / "acceptance.json").read_text())["acceptance"]
    assert (first["run"], first["images"], first["grid"]) == ("adt", 3, [4, 4])
    assert set(first["maps"]) == {"codes a call", "depth", "width"}
    steps = [json.loads(line) for line in (runs / "adt" / "steps.jsonl").read_text().splitlines()]
    committed = first["maps"]["codes a call"]
    assert committed[0][0] is None
    covering = [s for s in steps if s["position"] <= 6 <= s["position"] + s["accepted"]]
    assert len(covering) == 3
    assert committed[1][2] == pytest.approx(sum(s["accepted"] + 1 for s in covering) / 3, abs=1e-4)
    assert first["maps"]["width"][1][2] == pytest.approx(sum(s["width"] for s in covering) / 3, abs=1e-4)
    assert first["codes_a_call"] == pytest.approx(sum(s["accepted"] + 1 for s in steps) / len(steps))


def test_page_holds_everything(runs: Path, tmp_path: Path) -> None:
    stored = tmp_path / "bench.json"
    stored.write_text(json.dumps({**RESULT, "results": [{**ROW, "temperature": 0.0}, {**ROW, "arm": "adt"}]}))
    scored = {"line": "python main.py eval_quality x", "commit": "abc", "date": "today"}
    values = {"adt": [{"effnet_fd": 7.5}, {"effnet_fd": 1.25}], "ar": [{"is": 3.75}]}
    for name, entries in values.items():
        content = [{**scored, "scores": own} for own in entries]
        (runs / name / "scores.json").write_text(json.dumps(content))
    names = [str(runs / name) for name in ("ar", "adt", "relaxed")]
    assert main.main(["acceptance", *names[1:], "--output_dir", str(tmp_path / "a")]) == 0
    target = tmp_path / "page" / "report.html"
    words = ["report", str(stored), *names, str(tmp_path / "a"), "--html", str(target), "--paper", "coco"]
    assert main.main(words) == 0
    tags = read(target)
    text = "\n".join(tags.text)
    assert (
        len([address for address in tags.addresses if address.startswith("data:image/png")]) >= 1 + 9 + 2 + 1
    )
    shown = "1.50 (1.40-1.60)", "1.62", "Anole-7b on 100 captions", "effnet_fd", "1.25", "commit abc1234"
    assert "7.5" not in tags.text and "3.75" in tags.text  # the newest of each score
    for part in (*shown, '<b>pizza & "wine"</b>', "The first 3 of the 3 prompts"):
        assert part in text, part
    one, other = text.count(", the same image"), text.count(", another image")
    assert one >= 3 and other >= 1 and one + other == 6  # ADT-Tree draws plain decoding's images
    assert [path.suffix for path in sorted(target.parent.iterdir())] == [".html", ".png"]
    before = target.read_bytes()
    assert main.main(words) == 0
    assert target.read_bytes() == before


def test_images_of_other_prompts_do_not_stand_side_by_side(runs: Path, tmp_path: Path) -> None:
    """Names are rows of a file, where the file has no names: those of another file are other prompts."""
    shutil.copytree(runs / "relaxed", tmp_path / "other")
    (path,) = (tmp_path / "other").glob("global_statistics_*.json")
    path.write_text(path.read_text().replace('"cat"', '"dog"'))
    words = ["report", str(runs / "ar"), str(tmp_path / "other"), "--html", str(tmp_path / "r.html")]
    assert main.main(words) == 0
    text = read(tmp_path / "r.html").text
    assert "red heart" in text and "cat" not in text and "dog" not in text
    assert any("The first 2 of the 2 prompts" in part for part in text)


def test_the_papers_figures_stand_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "bench.json"
    rows = [{**ROW, "temperature": t, "arm": arm} for t in (0.0, 1.0) for arm in ("adt", "ar")]
    stored.write_text(json.dumps({**RESULT, "results": rows}))
    assert main.main(["report", str(tmp_path), "--paper", "coco"]) == 0  # a folder stands for what it holds
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("| paper SR | paper tau | paper depth |") and lines[1].count("|") == lines[
        0
    ].count("|")
    assert lines[2].endswith("| 2.21 | 3.40 | 3.86 |") and "1.50 (1.40-1.60)" in lines[2]
    assert all(line.endswith("| - | - | - |") for line in lines[3:6])
    assert main.main(["report", str(tmp_path), "--paper", "parti"]) == 0
    assert "paper" not in capsys.readouterr().out.lower()  # it has no figure for any of these rows
    assert cells("parti", "adt_lantern", 0.0) == ["3.05", "3.97", "4.31"] and set(PAPER) == {"coco", "parti"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "EMPTY"], "holds none of bench.json"),
        (["report", "EMPTY", "--html", "x.html"], "holds no results"),
        (["report", "absent.json", "--html", "x.html"], "absent.json"),
        (["report", "EMPTY", "--html", "x.html", "--into", "y.md"], "--into and --html"),
        (["acceptance", "EMPTY"], "no global_statistics"),
        (["acceptance", "absent"], "no global_statistics"),
    ],
)
def test_what_is_missing_is_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    assert main.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err


def test_grid_is_told_by_the_cycles() -> None:
    steps = [
        {"position": 1, "row": 0, "column": 1, "accepted": 4},
        {"position": 6, "row": 1, "column": 2, "accepted": 1},
    ]
    assert grid_of(steps) == (2, 4)
    assert grid_of(steps[:1]) == (1, 6)
    with pytest.raises(UserError, match="not those of one image"):
        grid_of([steps[0], {**steps[1], "accepted": 0}])


def test_correlation() -> None:
    assert correlation([[NAN, 1, 2, 3]], [[5, 2, 4, 6]]) == pytest.approx(1)
    assert correlation([[1, 2, 3]], [[3, 2, 1]]) == pytest.approx(-1)
    assert correlation([[1, 2]], [[7, 7]]) is None


@pytest.mark.parametrize(
    "script", sorted((Path(__file__).parent.parent / "scripts").glob("*.sh")), ids=lambda p: p.name
)
def test_scripts_are_shell(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
