"""The log of a drafter's training: log.jsonl, and the same figures as TensorBoard's events."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from training import drafter_states
from training.drafter_states import EVENTS, LOG, Log

ROWS = [(2, {"loss": 1.5, "agreement": [0.5, 0.25]}), (4, {"loss": None, "agreement": [0.75, 0.5]})]
SCALARS = [
    ("loss", 1.5, 2), ("agreement/1", 0.5, 2), ("agreement/2", 0.25, 2),
    ("agreement/1", 0.75, 4), ("agreement/2", 0.5, 4),
]  # fmt: skip


class Board:
    """What torch.utils.tensorboard offers, kept in a list."""

    def __init__(self, folder: str, purge_step: int) -> None:
        Path(folder).mkdir(exist_ok=True)
        self.purge_step, self.scalars, self.flushed = purge_step, list[tuple[str, float, int]](), 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.scalars)


def filled(root: Path) -> Any:
    """The board of a new log with two rows."""
    log = Log(root, -1)
    for at, row in ROWS:
        log.add(at, row)
    return log.board


def test_rows_become_scalars_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    board = filled(tmp_path)
    assert board.scalars == SCALARS and board.flushed == len(SCALARS)
    assert [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()] == [
        {"step": step, **row} for step, row in ROWS
    ]
    assert board.purge_step == 0
    with (tmp_path / LOG).open("a") as stream:
        stream.write('{"st')
    assert Log(tmp_path, 2).board.purge_step == 3  # the row of step 2 stays, and nothing else
    (line,) = (tmp_path / LOG).read_text().splitlines()
    assert json.loads(line) == {"step": 2, **ROWS[0][1]}
    drafter_states.discard(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_tensorboard_the_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert filled(tmp_path) is None
    assert len((tmp_path / LOG).read_text().splitlines()) == len(ROWS) and not (tmp_path / EVENTS).exists()


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    """Also those of a run that was killed after step 4 and went on from step 2."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    filled(tmp_path)
    Log(tmp_path, 2).add(3, {"loss": 0.5})
    found = EventAccumulator(str(tmp_path / EVENTS)).Reload()
    shown = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert shown == {
        "loss": [(2, 1.5), (3, 0.5)],
        "agreement/1": [(2, 0.5)],
        "agreement/2": [(2, 0.25)],
    }
