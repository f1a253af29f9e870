"""throughput: slots stay full while images wait, the same images at every batch size, rows that add up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import main
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from eval import arms, costs
from eval.method import Method
from eval.throughput import Traffic, traffic
from models.registry import load

Run = Callable[..., tuple[int, str, str]]
WORDS = "--num_images 5 --batch_sizes 1 2 --warmup 0".split()
CLOCKS = ("images_per_min", "SR", "seconds", "cycle_ms", "predicted_ms")


class Watched:
    """A target that notes how many images are in flight at every pass, and whether others still waited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.grid, self.num_codes, self.slots, self.device = (
            inner.grid,
            inner.num_codes,
            inner.slots,
            inner.device,
        )
        self.live: set[int] = set()
        self.waiting, self.passes, self.log = True, inner.passes, list[tuple[int, bool]]()

    def requests(self, requests: list[Request]) -> Iterator[Request]:
        """The queue."""
        yield from requests
        self.waiting = False

    def prefill(self, slot: int, prompt: Any) -> Any:
        """See Target."""
        self.live.add(slot)
        return self._inner.prefill(slot, prompt)

    def forward(self, tree: Any, committed: Any) -> Any:
        """See Target."""
        self.log.append((len(self.live), self.waiting))
        return self._inner.forward(tree, committed)

    def commit(self, verdict: Any, scored: Any) -> None:
        """See Target."""
        self._inner.commit(verdict, scored)

    def release(self, slot: int) -> None:
        """See Target."""
        self.live.discard(slot)
        self._inner.release(slot)


@pytest.mark.parametrize("shape", [None, TreeShape(4, 3, 6)])
def test_slots_stay_full_and_images_stay_the_same(tiny_checkpoint: Path, shape: TreeShape | None) -> None:
    model = load("emoji", tiny_checkpoint, None, "fp32", "cpu", need_drafter=False)
    requests = [Request(str(n), model.encode(f"thing {n}" * (1 + n % 3)), 7 * n) for n in range(9)]
    longest = max(request.prompt.length for request in requests)
    made = {}
    for slots in (1, 2, 4, 16):
        arm = arms.build(model, Method(1.0, 2000, 1.0, 3.0, shape=shape, drafter="jacobi"), slots, longest)
        watched = Watched(arm.target)
        images = {i.name: i for i in replace(arm, target=watched).decode(watched.requests(requests))}
        made[slots] = [images[request.name].codes for request in requests]
        assert all(live == slots for live, waiting in watched.log if waiting)
        calls = [images[request.name].target_calls for request in requests]
        use, lives = traffic(calls, slots), [live for live, _ in watched.log]
        assert use.passes == len(lives) and sum(lives) == sum(calls)
        assert use.occupancy == pytest.approx(sum(lives) / (slots * len(lives)))
        assert use.tail == pytest.approx(sum(live < slots for live in lives) / len(lives))
    assert all(codes == made[1] for codes in made.values())


def test_traffic_by_hand() -> None:
    assert traffic([5, 3, 4], 1) == Traffic(12, 1.0, 0.0)
    assert traffic([5, 3, 4], 2) == Traffic(7, 12 / 14, 2 / 7)
    assert traffic([5], 4) == Traffic(5, 0.25, 1.0)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """throughput on the tiny checkpoint into tmp_path / o: (status, stdout, stderr)."""
    monkeypatch.setitem(costs.TAUS, "emoji", {3: 50.0})

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        fixed = ["--model_path", str(tiny_checkpoint), "--precision", "fp32"]
        status = main.main(["throughput", *fixed, "--output_dir", str(tmp_path / "o"), *words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_rows_table_and_picture(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(*WORDS)
    assert (status, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "o" / "throughput.json").read_text())
    rows = result["results"]
    assert [(row["batch_size"], row["arm"], row["nodes"]) for row in rows] == [
        (count, *arm) for count in (1, 2) for arm in (("ar", 0), ("jacobi", 31), ("auto", 3))
    ]
    for row in rows:
        assert row["same_image"] == 1 and row["images_per_min"] == pytest.approx(
            60 / row["seconds"], abs=0.01
        )
        assert row["cycle_ms"] > 0 and row["predicted_ms"] > 0 and f"{row['images_per_min']:.1f}" in out
        assert row["occupancy"] == 1 if row["batch_size"] == 1 else 0.5 < row["occupancy"] < 1
        assert (row["tau"] == 1) == (row["arm"] == "ar")
    assert [table["images"] for table in result["costs"]] == [1, 2]
    assert (tmp_path / "o" / "throughput.png").read_bytes()[:4] == b"\x89PNG"
    assert main.main(["report", str(tmp_path / "o" / "throughput.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("| 2 | ") and len(lines) == 6 and lines[2].count("|") == lines[0].count("|")
    again = json.loads(run(*WORDS)[1].splitlines()[-1])  # nothing is measured twice
    assert [row["seconds"] for row in again["results"]] == [row["seconds"] for row in rows]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--batch_sizes 0", "0 is too small"), ("--batch_sizes 2 4 2", "--batch_sizes: 2 stands twice"),
        ("--batch_size 4", "unknown option --batch_size"), ("--drafter_path D", "no drafter network"),
    ],
)  # fmt: skip
def test_refused_in_one_line(run: Run, tmp_path: Path, more: str, says: str) -> None:
    status, out, err = run(*more.split())
    assert (status, out) == (2, "") and says in err and len(err.splitlines()) == 1
    assert not (tmp_path / "o").exists()
