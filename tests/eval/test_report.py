"""report: stored results as tables, documents and figures, maps of acceptance; damaged files are named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import main
from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from eval.acceptance import average, correlation, maps
from eval.tables import curve, short
from storage.run_folder import read_records
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.runs import ROOT

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


def test_the_short_table_says_in_words_what_becomes_of_the_image() -> None:
    names = {"zipar": False, "eagle-2": True, "self-draft-lantern": False, "sjd": False, "ar": True}
    rows = [{**ROW, "method": name, "exact": exact} for name, exact in names.items()]
    assert short({**RESULT, "rows": rows}).splitlines()[2:] == [
        "| ar | that of plain decoding | 3.25 | 1.50 |",
        "| self-draft-lantern | changed | 3.25 | 1.50 |",
        "| sjd | another sample | 3.25 | 1.50 |",
        "| zipar | changed | 3.25 | 1.50 |",
    ]


def test_documents(tmp_path: Path, run: Run, refused: Refused) -> None:
    stored, page = tmp_path / "bench_cpu.json", tmp_path / "page.md"
    stored.write_text(json.dumps(RESULT))
    page.write_text("top\n<!-- bench_cpu:start -->\nold\n<!-- bench_cpu:end -->\nend\n")
    for _ in range(2):
        assert run("report", stored, "--into", page)[0] == 0
        text = page.read_text()
        assert text.startswith("top\n") and text.endswith("<!-- bench_cpu:end -->\nend\n")
        assert "old" not in text and text.count("| adt-tree | that of plain decoding | 3.25 | 1.50 |") == 1
    page.write_text("nothing here\n")
    assert "bench_cpu:start" in refused("report", stored, "--into", page)
    assert page.read_text() == "nothing here\n"


def test_the_stored_results_are_the_document(tmp_path: Path, run: Run) -> None:
    assert run("report", "--write", tmp_path / "new" / "RESULTS.md")[0] == 0
    stored = (ROOT / "docs" / "RESULTS.md").read_text()
    assert (tmp_path / "new" / "RESULTS.md").read_text() == stored


@pytest.mark.parametrize(
    "content",
    [
        "\udcff", "[" * 100_000, '{"images": 3, "different": []}',
        json.dumps({**RESULT, "rows": [{**ROW, "tau": "much"}]}),
        json.dumps({**RESULT, "profile": [{"method": "adt"}]}),
    ],
    ids=range(5),
)  # fmt: skip
def test_files_that_are_no_result_are_named(content: str, tmp_path: Path, refused: Refused) -> None:
    path, document = tmp_path / "bad.json", tmp_path / "document.md"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for words in ([], ["--figures", tmp_path / "figures"], ["--into", document]):
        assert "bad.json" in refused("report", path, *words)
    assert not document.exists() and not (tmp_path / "figures").exists()


def test_the_papers_figures_stand_beside_each_rule(tmp_path: Path, run: Run) -> None:
    rows = [
        {**ROW, "temperature": t, "method": "adt-tree", "tau": tau, "varied": {"verify": rule}}
        for t in (0.0, 1.0) for rule, tau in (("coupled", 3.25), ("rejection", 2.75))
    ]  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps({**RESULT, "rows": rows}))
    text = run("report", tmp_path, "--paper", "coco")[1]  # a folder means the results in it
    published, coupled = text.index("published rejection rule"), text.index("coupled rule")
    assert published < text.index("| 2.75") < coupled < text.index("| 3.25")
    lines = [line for line in text.splitlines() if line.startswith("| adt-tree |")]
    assert len(lines) == 2 and all(line.endswith("| 2.21 | 3.40 | - | - |") for line in lines)
    # The paper's table for Parti has none of these models.
    assert "2.21" not in run("report", tmp_path, "--paper", "parti")[1]


@pytest.fixture(scope="module")
def runs(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folders of runs: the AR baseline, adaptive trees with the same images, relaxed acceptance,
    and several rows at once."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "EMPTY").mkdir()
    prompts = folder / "p.txt"
    prompts.write_text('red heart\n<b>pizza & "wine"</b>\ncat\n')
    fixed = [*checkpoints["emoji"].words(), "--prompt", str(prompts), "--heatmaps", "0"]
    for name, words in {
        "ar": "--model_type base", "adt": "--method adt-tree",
        "relaxed": "--method eagle-2 --lantern --lantern_delta 0.9", "rows": "--method zipar",
    }.items():  # fmt: skip
        assert main.main(["generate_images", *fixed, *words.split(), "--output_dir", str(folder / name)]) == 0
    return folder


def test_what_is_missing_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(runs)
    for words, named in {
        "": "RESULT", "EMPTY": "EMPTY", "absent.json": "absent.json", "EMPTY --figures x": "EMPTY",
        "EMPTY --race x.html --into y.md": "--into y.md", "ar --figures x --paper coco": "--paper",
        "ar --paper coco": "--paper coco", "ar --write x": "ar:", "ar --into x": "ar:",
    }.items():  # fmt: skip
        assert named in refused("report", *words.split())
    assert not Path("x").exists()


def test_several_rows_at_once_have_no_maps(runs: Path, run: Run, refused: Refused, tmp_path: Path) -> None:
    assert average(runs / "rows")["maps"] == {} and "| - |" in run("report", runs / "rows")[1]
    assert "no maps" in refused("report", runs / "rows", "--figures", tmp_path)


def test_acceptance_averages_over_images(runs: Path, run: Run) -> None:
    result = average(runs / "adt")
    steps = [step for image in read_records(runs / "adt") for step in image.steps]
    covering = [s for s in steps if s["position"] <= 6 <= s["position"] + s["accepted"]]  # row 1, column 2
    expected = {
        "codes per call": sum(s["accepted"] + 1 for s in covering) / 3,
        "depth": sum(s["depth"] for s in covering) / 3,
        "width": sum(s["width"] for s in covering) / 3,
    }
    assert result["images"] == len(covering) == 3 and math.isnan(result["maps"]["depth"][0, 0])
    assert {name: result["maps"][name][1, 2] for name in expected} == pytest.approx(expected)
    assert result["codes_per_call"] == pytest.approx(sum(s["accepted"] + 1 for s in steps) / len(steps))
    out = run("report", runs / "adt", runs / "relaxed")[1]
    assert f"| {runs / 'adt'} | 3 | {result['codes_per_call']:.2f} |" in out


def test_top1_is_mapped_where_all_steps_hold_it(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "adt", tmp_path / "adt")

    def rewrite(change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes every step of every record."""
        for path in (tmp_path / "adt" / "records").iterdir():
            content = json.loads(path.read_text())
            for step in content["steps"]:
                change(step)
            path.write_text(json.dumps(content))

    rewrite(lambda step: step.update(top1=[1 / (step["accepted"] + 1)] * (step["accepted"] + 1)))
    result = average(tmp_path / "adt")
    assert "top1" in result["maps"] and result["correlation"] < 0
    rewrite(lambda step: step.update(top1=[]))
    result = average(tmp_path / "adt")
    assert "top1" not in result["maps"] and result["correlation"] is None
    rewrite(lambda step: step.pop("accepted"))
    with pytest.raises(UserError, match="records"):
        average(tmp_path / "adt")


def test_the_newest_scores_are_a_table(runs: Path, tmp_path: Path, run: Run, refused: Refused) -> None:
    folders = [Path(shutil.copytree(runs / name, tmp_path / name)) for name in ("ar", "adt")]
    for folder, scores in zip(
        folders, ([{"is": 3.75}], [{"fid": 7.5, "is": 2.0}, {"fid": 1.25}]), strict=True
    ):
        (folder / "scores.jsonl").write_text("".join(json.dumps({"scores": one}) + "\n" for one in scores))
    lines = run("report", *folders)[1].splitlines()
    assert f"| {folders[0]} | 3.75 | - |" in lines and f"| {folders[1]} | 2 | 1.25 |" in lines
    (folders[0] / "scores.jsonl").write_text('{"scores": {"fid": "much"}}\n')
    assert "scores.jsonl" in refused("report", *folders)


def test_figures_have_a_row_per_run(runs: Path, tmp_path: Path, run: Run) -> None:
    rows = [{**ROW, "temperature": 0.0}, {**ROW, "method": "adt-tree"}]
    (tmp_path / "cpu.json").write_text(json.dumps({**RESULT, "rows": rows}))
    quality = [{**row, "nll": 0.8, "projected": 2.0, "varied": {"verify": "coupled"}} for row in rows]
    (tmp_path / "quality.json").write_text(json.dumps({**RESULT, "rows": quality}))
    both, one = tmp_path / "both", tmp_path / "one"
    several = [*quality, *({**row, "batch_size": 16, "total_token": 16} for row in quality)]
    (tmp_path / "several.json").write_text(json.dumps({**RESULT, "rows": several}))
    plots = [tmp_path / name for name in ("quality.json", "several.json")]
    assert run("report", *plots, "--figures", tmp_path / "quality")[0] == 0
    widths = [Image.open(tmp_path / "quality" / f"{plot.stem}_frontier_1.png").width for plot in plots]
    assert widths[1] == 1.5 * widths[0]  # a panel more: images in flight
    drawn = {path.name for path in (tmp_path / "quality").glob("quality_*")}
    assert drawn == {"quality_speed.png", "quality_frontier_0.png", "quality_frontier_1.png"}
    assert [curve(row, several) for row in several[:3:2]] == ["eagle-2 8", "eagle-2 16"]
    assert run("report", tmp_path / "cpu.json", runs / "adt", runs / "relaxed", "--figures", both)[0] == 0
    assert run("report", runs / "adt", "--figures", one)[0] == 0
    assert {path.name for path in both.iterdir()} == {"cpu_speed.png", "acceptance.png"}
    heights = [Image.open(folder / "acceptance.png").height for folder in (both, one)]
    assert heights[0] > heights[1]
    Image.open(both / "cpu_speed.png").verify()


TWO = Grid(2, 5, before=(Raster(3, 2),))  # positions 0 to 5 and 6 to 15


def test_rasters_lie_side_by_side() -> None:
    """A step that begins in one raster and ends in the next counts for cells of both."""
    spans = [(1, 4, 3), (5, 9, 1), (10, 12, 2), (13, 15, 0)]  # first and last position, depth
    steps: list[dict[str, Any]] = []
    for first, last, depth in spans:
        row, column, raster = TWO.cell(first)
        step = {"position": first, "row": row, "column": column, "raster": raster}
        steps.append({**step, "accepted": last - first, "depth": depth, "width": 2})
    depths = maps(steps, TWO)["depth"]
    assert depths.shape == (3, 2 + 1 + 5)
    expected = [[NAN, 3, NAN, 1, 1, 1, 1, 2], [3, 3, NAN, 2, 2, 0, 0, 0], [3, 1, NAN, *5 * [NAN]]]
    assert np.array_equal(depths, np.array(expected), equal_nan=True)


def test_correlation() -> None:
    assert correlation([[NAN, 1, 2, 3]], [[5, 2, 4, 6]]) == pytest.approx(1)
    assert correlation([[1, 2, 3]], [[3, 2, 1]]) == pytest.approx(-1)
    assert correlation([[1, 2]], [[7, 7]]) is None
