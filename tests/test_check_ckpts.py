"""check_ckpts names all that is wrong, reads no weights, and loading refuses the same in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import weights
from models.errors import CheckpointError
from tests.checkpoints import Checkpoints, load
from tests.conftest import Run
from tests.published import edit, rewrite

Check = Callable[..., tuple[list[str], str]]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, its weights in three shards."""
    folder = checkpoints["emoji"].copied(tmp_path / "copy").path
    rewrite(folder, torch.float32, 3)
    return folder


@pytest.fixture
def check(run: Run, copy: Path) -> Check:
    """check_ckpts on the copy: faults and standard error."""

    def call(*words: object) -> tuple[list[str], str]:
        status, out, err = run("check_ckpts", "--model_path", copy, *words)
        document = json.loads(out.splitlines()[-1])
        faults = [fault for part in document["models"]["emoji"] for fault in part["faults"]]
        assert (document["ok"], status) == ((False, 2) if faults else (True, 0))
        return faults, err

    return call


def not_loaded(folder: Path) -> str:
    """The one line in which loading refuses."""
    with pytest.raises(CheckpointError) as caught:
        load("emoji", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_wrong_and_nothing_read(
    check: Check, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load("emoji", copy).codec
    monkeypatch.setattr(weights.Stored, "read", None)
    assert check() == ([], "")
    shutil.move(copy / "drafter", tmp_path / "away")
    assert check("--drafter_path", tmp_path / "away") == ([], "")
    assert check("--drafter_path", copy / "nowhere")[0]


def test_every_shard_at_fault_is_named(check: Check, copy: Path) -> None:
    first, second, third = sorted(copy.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    faults, err = check()
    assert len(faults) == 2 and "2 in all" in err
    assert "does not exist" in faults[0] and first.name in faults[0]
    assert "truncated" in faults[1] and second.name in faults[1]
    assert first.name in not_loaded(copy) and "1 more" in not_loaded(copy)
    third.unlink()
    assert len(check()[0]) == 3


def test_every_tensor_at_fault_is_named(check: Check, copy: Path) -> None:
    edit(copy / "config.json", lambda config: config.update(intermediate_size=32))
    faults, _ = check()
    assert len(faults) == 6  # three projections in two layers
    assert all("mlp" in fault and "config.json asks for" in fault for fault in faults)
    assert "mlp" in not_loaded(copy) and "(and 5 more of" in not_loaded(copy)
    edit(copy / "config.json", lambda config: config.update(intermediate_size=64, num_hidden_layers=3))
    assert all("model.layers.2." in fault and "missing" in fault for fault in check()[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chameleon"], "chameleon: there is no such model"),
        (["emoji", "anole", "--model_path", "x"], "--model_path x: it is of one model"),
        (["--modle", "x"], "did you mean --model"),
    ],
)
def test_what_the_user_can_put_right(run: Run, words: list[str], says: str) -> None:
    status, _, err = run("check_ckpts", *words)
    assert status == 2 and says in err
