"""quality_curve on made-up runs: what equals, what is far, what may not be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import main
from tests import metric_checkpoints as tiny

LAW = {
    "model": "emoji",
    "weights": "w",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "cfg": 3.0,
    "precision": "fp32",
}
TREE = {"depth": 16, "width": 3, "budget": 23}


def make(folder: Path, seed: int, turned: int = 0, **settings: Any) -> str:
    """A run of four prompts, their first pictures turned."""
    (folder / "img").mkdir(parents=True)
    plain = {"tree": None, "static": None, "lantern": None}
    config = {"determines_images": LAW | plain | {"random_seed": seed} | settings}
    (folder / "generation_configs.json").write_text(json.dumps(config))
    entries = {}
    for row in range(4):
        image = tiny.picture(40 + seed, 40 + seed).crop((row, row, 32 + row, 32 + row))
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if row < turned else image
        image.save(folder / "img" / f"{row}.png")
        calls = 10 + row
        entries[str(row)] = {
            "prompt": f"p{row}",
            "ann_id": row,
            "acceptance_length": 20 / calls,
            "target_calls": calls,
        }
    (folder / "global_statistics_0_10000.json").write_text(json.dumps(entries))
    return str(folder)


def curve(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status and outputs."""
    status = main.main(["quality_curve", *words])
    return status, *capsys.readouterr()


def test_rows_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, one, two = (make(tmp_path / f"ar{seed}", seed) for seed in (1, 2, 5))
    exact = make(tmp_path / "exact", 1, tree=TREE)
    loose = make(tmp_path / "loose", 1, 3, tree=TREE, lantern={"k": 100, "delta": 2.0})
    tight = make(tmp_path / "tight", 1, 1, tree=TREE, lantern={"k": 100, "delta": 0.1})
    out = tmp_path / "out"
    words = ("--base", base, "--others", one, two, "--arms", loose, exact, tight, "--output_dir", str(out))
    status, printed, err = curve(capsys, *words)
    assert status == 0, err
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads((out / "table3_quality.json").read_text())
    rows = {row["arm"]: row for row in result["results"]}
    assert [row["arm"] for row in result["results"]][-3:] == ["exact", "tight", "loose"]
    assert (rows["exact"]["same_images"], rows["exact"]["same_pixels"]) == (1, 1)
    assert rows["exact"]["fd_same_seed"] == pytest.approx(0, abs=1e-6)
    assert rows["tight"]["same_images"] == 0.75 and rows["loose"]["same_images"] == 0.25
    assert 0 < rows["tight"]["fd_same_seed"] < rows["loose"]["fd_same_seed"]
    assert rows["exact"]["fd_other_seeds"] == pytest.approx(rows["ar"]["fd_other_seeds"])
    yardstick = [row["fd_other_seeds"] for name, row in rows.items() if name.startswith("plain decoding")]
    assert len(yardstick) == 3 and sum(yardstick[:2]) / 2 == pytest.approx(rows["ar"]["fd_other_seeds"])
    assert rows["ar"]["tau"] == pytest.approx(80 / 46) and rows["loose"]["k"] == 100
    with Image.open(out / "quality_speed.png") as plot:
        assert plot.format == "PNG" and plot.width > 500
    assert printed.count("| tight | 0.1 | 100 |") == 1
    document = tmp_path / "README.md"
    document.write_text("a\n<!-- table3_quality:start -->\nold\n<!-- table3_quality:end -->\nb\n")
    assert main.main(["report", str(out), "--into", str(document)]) == 0
    written = document.read_text()
    assert "| tight | 0.1 | 100 |" in written and "4 images an arm" in written and "old" not in written


def test_what_may_not_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, other = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    arm = make(tmp_path / "arm", 1, tree=TREE)
    late = make(tmp_path / "late", 3, tree=TREE)
    warm = make(tmp_path / "warm", 1, tree=TREE, temperature=0.5)
    short = make(tmp_path / "short", 1, tree=TREE)
    (tmp_path / "short" / "img" / "2.png").unlink()
    for words, said in (
        ((base, other, late), "seed 3, --base has 1"),
        ((base, other, warm), "temperature = 0.5"),
        ((base, base, arm), "all must differ"),
        ((arm, other, arm), "not plain decoding"),
        ((base, other, short), "missing are those of 2"),
        ((base, other, str(tmp_path / "none")), "no run of generate_images"),
    ):
        status, _, err = curve(
            capsys,
            "--base",
            words[0],
            "--others",
            words[1],
            "--arms",
            words[2],
            "--output_dir",
            str(tmp_path / "o"),
        )
        assert status == 2 and said in err and err.count("\n") == 1, err
    statistics = tmp_path / "arm" / "global_statistics_0_10000.json"
    statistics.write_text(statistics.read_text().replace("p1", "another"))
    status, _, err = curve(capsys, "--base", base, "--others", other, "--arms", arm)
    assert status == 2 and "not of the same prompts" in err
