"""report: stored results as tables, in documents and on a page; maps of acceptance; damage is one line."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import main
from adt_tree.errors import UserError
from eval.acceptance import average, correlation, grid_of
from eval.report import PAPER, cells, short
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run

NAN = math.nan
ROW = {
    "method": "eagle-2", "temperature": 1.0, "total_token": 8, "batch_size": 1, "varied": {}, "exact": True,
    "SR": 1.5, "SR_95": [1.4, 1.6], "tau": 3.25, "mean_depth": 5.0, "mean_nodes": 16.0, "target_calls": 80.0,
    "drafter_calls": 400.0, "step_ms": 12.5, "median_s": 0.5, "images_per_min": 120.0, "images": 2,
    "same_image": 1.0,
}  # fmt: skip
RESULT: dict[str, Any] = {
    "command": "python main.py bench", "prompts": 16, "options": {},
    "environment": {"commit": "abc1234", "dirty": False, "date": "today", "device": "a CPU", "torch": "2",
                    "threads": 2, "precision": "fp32"},
    "rows": [ROW, {**ROW, "method": "adt-tree"}],
    "profile": [{"configuration": "adt-tree T=1", "shares": {"target": 0.6, "host": 0.4}}],
}  # fmt: skip


def test_what_was_varied_has_columns() -> None:
    varied = {**ROW, "varied": {"adt_beta": 0.3}}
    rows = [{**varied, "total_token": n, "temperature": t} for n in (8, 16) for t in (0.0, 1.0)]
    head, *lines = cells({**RESULT, "rows": [{**ROW, "method": "ar", "total_token": None}, *rows]})
    assert head[:4] == ["method", "T", "nodes", "adt_beta"] and {len(line) for line in lines} == {len(head)}
    assert lines[0][:4] == ["ar", "1", "-", "-"] and lines[-1][:4] == ["eagle-2", "1", "16", "0.3"]
    table = short({**RESULT, "rows": rows}).splitlines()
    assert table[0] == "| method | tau, T = 0 | speed-up, T = 0 | tau, T = 1 | speed-up, T = 1 |"
    assert table[2:] == [f"| eagle-2 nodes {n} adt_beta 0.3 | 3.25 | 1.50 | 3.25 | 1.50 |" for n in (8, 16)]


def test_documents(tmp_path: Path, run: Run, refused: Refused) -> None:
    stored, page = tmp_path / "bench_cpu.json", tmp_path / "page.md"
    stored.write_text(json.dumps(RESULT))
    page.write_text("top\n<!-- bench_cpu:start -->\nold\n<!-- bench_cpu:end -->\nend\n")
    for _ in range(2):
        assert run("report", stored, "--into", page)[0] == 0
        text = page.read_text()
        assert text.startswith("top\n") and text.endswith("<!-- bench_cpu:end -->\nend\n")
        assert "old" not in text and text.count("| eagle-2 | 3.25 | 1.50 |") == 1
    page.write_text("nothing here\n")
    assert "bench_cpu:start" in refused("report", stored, "--into", page)
    assert page.read_text() == "nothing here\n"


def test_the_stored_results_are_the_document(tmp_path: Path, run: Run) -> None:
    assert run("report", "--write", tmp_path / "new" / "RESULTS.md")[0] == 0
    stored = Path(__file__).parent.parent / "docs" / "RESULTS.md"
    assert (tmp_path / "new" / "RESULTS.md").read_text() == stored.read_text()


def test_methods_that_no_longer_exist_are_left_out_by_name(tmp_path: Path, run: Run) -> None:
    kept = ("eagle-2", "adt-tree-lantern", "self-draft:accept-all", "transformers")
    rows = [{**ROW, "method": name} for name in (*kept, "gone", "gone-lantern")]
    shares = [{**RESULT["profile"][0], "configuration": f"{name} T=1"} for name in ("gone", "ar")]
    (tmp_path / "bench.json").write_text(json.dumps({**RESULT, "rows": rows, "profile": shares}))
    out = run("report", tmp_path)[1]
    assert all(f"| {name} |" in out for name in kept)
    assert "gone, gone-lantern" in out and "| gone" not in out and "| ar T=1 |" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("[]", "holds no rows"),
        ('{"rows": []}', "holds no rows"),
        ('{"rows": [3]}', "damaged (TypeError"),
        ("\udcff", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"rows": [ROW]}), "damaged (KeyError"),
        (json.dumps({**RESULT, "rows": [{**ROW, "tau": "much"}]}), "damaged (ValueError"),
        (json.dumps({**RESULT, "rows": [{**ROW, "SR_95": 3}]}), "damaged (TypeError"),
        (json.dumps({**RESULT, "profile": [{"method": "adt"}]}), "damaged (KeyError"),
        (json.dumps({**RESULT, "rows": [{"proposer": "eagle", "tau": 2.0}]}), "damaged (KeyError"),
    ],
)
def test_what_is_no_result_is_one_line(content: str, says: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for words in ([path], [path, "--html", tmp_path / "x.html"], [path, "--into", tmp_path / "x.md"]):
        err = refused("report", *words)
        assert says in err and "bad.json" in err


def test_the_papers_figures_stand_beside_ours(tmp_path: Path, run: Run) -> None:
    rows = [{**ROW, "temperature": t, "method": name} for t in (0.0, 1.0) for name in ("adt-tree", "ar")]
    (tmp_path / "bench.json").write_text(json.dumps({**RESULT, "rows": rows}))
    lines = run("report", tmp_path, "--paper", "coco")[1].splitlines()  # a folder stands for what it holds
    assert lines[0].endswith("| paper SR | paper tau | paper depth |")
    assert lines[1].count("|") == lines[0].count("|")
    assert lines[2].endswith("| 2.21 | 3.40 | 3.86 |") and "1.50 (1.40-1.60)" in lines[2]
    assert all(line.endswith("| - | - | - |") for line in lines[3:6])
    assert "| adt-tree T=1 | 60% | 40% |" in lines and not any("assembled" in line for line in lines)
    assert "paper" not in run("report", tmp_path, "--paper", "parti")[1].lower()  # it has none of these rows
    assert set(PAPER) == {"coco", "parti"} and PAPER["parti"]["adt-tree-lantern", 0.0] == (3.05, 3.97, 4.31)


class Page(HTMLParser):
    """A page, taken apart: every tag is closed, and it needs nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.parts = list[str](), list[str]()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = "\n".join(self.parts)
        assert not self.open and not re.search(r"https?://|url\(|@import", self.source)
        assert not re.search(r"(src|href|srcset|action)=(?!\"data:)", self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "object"), tag
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


@pytest.fixture(scope="module")
def runs(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: the AR baseline, adaptive trees (the same images), and relaxed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "EMPTY").mkdir()
    prompts = folder / "p.txt"
    prompts.write_text('red heart\n<b>pizza & "wine"</b>\ncat\n')
    fixed = [*checkpoints["emoji"].words(), "--prompt", str(prompts), "--heatmaps", "1"]
    for name, words in {
        "ar": "--model_type base", "adt": "--drafter_type eagle --peanut",
        "relaxed": "--drafter_type eagle --lantern --lantern_delta 0.9",
    }.items():  # fmt: skip
        assert main.main(["generate_images", *fixed, *words.split(), "--output_dir", str(folder / name)]) == 0
    return folder


def test_what_is_missing_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(runs)
    for words, says in {
        "": "no RESULT", "EMPTY": "holds neither bench.json nor a run", "EMPTY --html x.html": "neither",
        "absent.json": "absent.json", "absent.json --html x.html": "absent.json",
        "EMPTY --html x.html --into y.md": "--into and --html", "EMPTY --animation x.webp": "neither",
        "ar --animation x.webp": "no race to show",
    }.items():  # fmt: skip
        assert says in refused("report", *words.split())


def test_acceptance_averages_over_images(runs: Path, run: Run) -> None:
    found = average(runs / "adt")
    steps = [json.loads(line) for line in (runs / "adt" / "steps.jsonl").read_text().splitlines()]
    committed = found["maps"]["codes per call"]
    covering = [s for s in steps if s["position"] <= 6 <= s["position"] + s["accepted"]]
    assert found["images"] == len(covering) == 3 and math.isnan(committed[0][0])
    assert committed[1][2] == pytest.approx(sum(s["accepted"] + 1 for s in covering) / 3)
    for kind in ("depth", "width"):
        assert found["maps"][kind][1][2] == pytest.approx(sum(s[kind] for s in covering) / 3)
    assert found["codes_per_call"] == pytest.approx(sum(s["accepted"] + 1 for s in steps) / len(steps))
    status, out, _ = run("report", runs / "adt", runs / "relaxed")
    assert status == 0 and f"| {runs / 'adt'} | 3 | {found['codes_per_call']:.2f} |" in out


def test_certainty_is_mapped_where_the_steps_tell_it(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "adt", tmp_path / "adt")

    def rewrite(change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes every step of every record."""
        for path in (tmp_path / "adt" / "records").iterdir():
            content = json.loads(path.read_text())
            for step in content["steps"]:
                change(step)
            path.write_text(json.dumps(content))

    rewrite(lambda step: step.update(top1=[1 / (step["accepted"] + 1)] * (step["accepted"] + 1)))
    found = average(tmp_path / "adt")
    assert set(found["maps"]) == {"codes per call", "depth", "width", "top1"} and found["correlation"] < 0
    rewrite(lambda step: step.update(top1=[]))
    assert average(tmp_path / "adt")["correlation"] is None
    rewrite(lambda step: step.pop("accepted"))
    with pytest.raises(UserError, match="damaged"):
        average(tmp_path / "adt")


def test_page_holds_everything(runs: Path, tmp_path: Path, run: Run) -> None:
    stored = tmp_path / "bench.json"
    rows = [{**ROW, "temperature": 0.0}, {**ROW, "method": "adt-tree"}]
    stored.write_text(json.dumps({**RESULT, "rows": rows}))
    scored = {"line": "python main.py eval_quality x", "commit": "abc", "date": "today"}
    for name, entries in {"adt": [{"effnet_fd": 7.5}, {"effnet_fd": 1.25}], "ar": [{"is": 3.75}]}.items():
        lines = [json.dumps({**scored, "scores": own}) for own in entries]
        (runs / name / "scores.jsonl").write_text("\n".join(lines))
    target = tmp_path / "page" / "report.html"
    words = [stored, *(runs / name for name in ("ar", "adt", "relaxed")), "--html", target, "--paper", "coco"]
    assert run("report", *words)[0] == 0
    page = Page(target)
    assert page.source.count('src="data:image/png') == 1 + 9 + 2 + 1  # a plot, images, heatmaps, maps
    shown = "1.50 (1.40-1.60)", "1.62", "Anole-7b on 100 captions", "effnet_fd", "1.25", "commit abc1234"
    assert "7.5" not in page.parts and "3.75" in page.parts  # the newest of each score
    for part in (*shown, '<b>pizza & "wine"</b>', "The first 3 of the 3 prompts"):
        assert part in page.text, part
    one, other = page.text.count(", the same image"), page.text.count(", another image")
    assert one >= 3 and other >= 1 and one + other == 6  # ADT-Tree makes the AR baseline's images
    assert [path.suffix for path in sorted(target.parent.iterdir())] == [".html", ".png", ".png"]
    before = target.read_bytes()
    assert run("report", *words)[0] == 0 and target.read_bytes() == before


def test_images_of_other_prompts_do_not_stand_side_by_side(runs: Path, tmp_path: Path, run: Run) -> None:
    """Names are rows of a file, where the file has no names: those of another file are other prompts."""
    shutil.copytree(runs / "relaxed", tmp_path / "other")
    for path in (tmp_path / "other" / "records").iterdir():
        path.write_text(path.read_text().replace('"cat"', '"dog"'))
    assert run("report", runs / "ar", tmp_path / "other", "--html", tmp_path / "r.html")[0] == 0
    page = Page(tmp_path / "r.html")
    assert "red heart" in page.parts and "cat" not in page.parts and "dog" not in page.parts
    assert "The first 2 of the 2 prompts" in page.text


def test_grid_is_told_by_the_steps() -> None:
    first = {"position": 1, "row": 0, "column": 1, "accepted": 4}
    last = {"position": 6, "row": 1, "column": 2, "accepted": 1}
    assert (grid_of([first, last]), grid_of([first])) == ((2, 4), (1, 6))
    with pytest.raises(UserError, match="not those of one image"):
        grid_of([first, {**last, "accepted": 0}])


def test_correlation() -> None:
    assert correlation([[NAN, 1, 2, 3]], [[5, 2, 4, 6]]) == pytest.approx(1)
    assert correlation([[1, 2, 3]], [[3, 2, 1]]) == pytest.approx(-1)
    assert correlation([[1, 2]], [[7, 7]]) is None
