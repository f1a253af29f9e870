"""budget: a point a drafter and budget, its shapes, its picture; measurements that outlive an interrupt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import main
from adt_tree.policy import TreeShape
from eval.budget_options import BUDGETS, shape_of
from eval.figures import budget
from eval.measurements import Measurements

Run = Callable[..., tuple[int, str, str]]
WORDS = "--budgets 16 4 --num_images 2 --warmup 0".split()
POINTS = [(drafter, nodes) for drafter in ("eagle", "jacobi", "hybrid") for nodes in (16, 4)]
CLOCKS = ("SR", "SR_95", "median_s")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path) -> Run:
    """budget on the tiny checkpoint into tmp_path / o: (status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        fixed = ["--model_path", str(tiny_checkpoint), "--precision", "fp32"]
        status = main.main(["budget", *fixed, "--output_dir", str(tmp_path / "o"), *words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def lasting(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What no clock decides."""
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in result["results"]]


def test_rows_table_and_picture(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(*WORDS)
    assert (status, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    stored = tmp_path / "o" / "budget.json"
    assert result == json.loads(stored.read_text())
    plain, *rows = result["results"]
    assert plain["arm"] == "ar" and plain["tau"] == 1 and "shape" not in plain
    assert [(row["drafter"], row["shape"]["budget"]) for row in rows] == POINTS
    for row in rows:
        assert row["arm"] == f"{row['drafter']} n{row['shape']['budget']}" and row["arm"] in out
        assert 0 < row["mean_nodes"] <= row["shape"]["budget"] and row["tau"] >= 1
        assert row["exact"] and row["same_image"] == 1
        assert (row["drafter_calls"] == 0) == (row["drafter"] == "jacobi")
    nodes = {row["arm"]: row["mean_nodes"] for row in rows}
    assert all(nodes[f"{name} n16"] > nodes[f"{name} n4"] + 3 for name in ("eagle", "jacobi", "hybrid"))
    assert (tmp_path / "o" / "budget.png").read_bytes()[:4] == b"\x89PNG"
    assert main.main(["report", str(stored)]) == 0
    assert "| jacobi n16 |" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the hybrid, whose calibration begins anew with a process: its drafts are others then.
    words = [*WORDS, "--drafters", "jacobi", "eagle"]
    whole = json.loads(run(*words)[1].splitlines()[-1])
    (tmp_path / "o").rename(tmp_path / "whole")
    add = Measurements.add

    def stop_after_seven(store: Measurements, *args: Any) -> None:
        if store.added == 7:
            raise KeyboardInterrupt
        add(store, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Measurements, "add", stop_after_seven)
        assert run(*words)[0] == 130
    assert not (tmp_path / "o" / "budget.json").exists()
    status, out, err = run(*words)
    parts = json.loads(out.splitlines()[-1])
    assert (status, err) == (0, "") and "Assembled from 2 runs" in out
    assert [part["measurements"] for part in parts["runs"]] == [5, 5] and lasting(parts) == lasting(whole)
    status, out, err = run(*words, "--budgets", "16", "8")
    assert (status, out) == (2, "") and "budgets" in err and "choose another folder" in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--budgets 0", "0 is too small"),
        ("--budgets 8 -1", "-1"),
        ("--budgets x", "'x' is not an integer"),
        ("--budgets 8 4 8", "--budgets: 8 stands twice"),
        ("--drafters jacobi jacobi", "--drafters: jacobi stands twice"),
        ("--drafters medusa", "medusa"),
        ("--drafters jacobi --drafter_path D", "--drafter_path D: no drafter network"),
        ("--arms jacobi", "unknown option --arms"),
    ],
)
def test_refused_in_one_line(run: Run, tmp_path: Path, more: str, says: str) -> None:
    status, out, err = run(*more.split())
    assert (status, out) == (2, "") and says in err and len(err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_shapes_follow_the_stated_rule() -> None:
    assert [shape_of("eagle", nodes) for nodes in BUDGETS] == [
        TreeShape(3, 3, 8), TreeShape(4, 4, 16), TreeShape(5, 4, 32), TreeShape(6, 5, 64),
        TreeShape(7, 7, 128),
    ]  # fmt: skip
    for drafter in ("jacobi", "hybrid"):
        assert [shape_of(drafter, nodes) for nodes in BUDGETS] == [
            TreeShape(6, 8, 8), TreeShape(12, 8, 16), TreeShape(20, 8, 32), TreeShape(32, 8, 64),
            TreeShape(64, 8, 128),
        ]  # fmt: skip
    for nodes in range(1, 300):
        eagle, jacobi = shape_of("eagle", nodes), shape_of("jacobi", nodes)
        narrower = eagle.width - 1
        assert eagle.width + (eagle.depth - 1) * eagle.width**2 >= 2 * nodes
        assert narrower + (eagle.depth - 1) * narrower**2 < 2 * nodes
        assert 1 <= jacobi.depth <= nodes and eagle.budget == jacobi.budget == nodes


def test_the_picture_takes_one_point_and_many(tmp_path: Path) -> None:
    def row(drafter: str, nodes: int) -> dict[str, Any]:
        shape = {"depth": 1, "width": 1, "budget": nodes}
        return {"drafter": drafter, "shape": shape, "tau": 2.0, "SR": 1.5, "SR_95": [1.4, 1.7]}

    sizes = []
    for rows in ([row("jacobi", 8)], [row(name, nodes) for name in ("eagle", "hybrid") for nodes in (64, 8)]):
        budget(rows, tmp_path / "p.png")
        sizes.append((tmp_path / "p.png").stat().st_size)
    assert 5_000 < sizes[0] < sizes[1]
