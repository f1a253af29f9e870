"""check_ckpts names all that is wrong, reads no weights, and loading refuses the same in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import weights
from models.errors import CheckpointError
from tests.checkpoints import Checkpoints, load
from tests.conftest import Run
from tests.published import edit, rewrite

Check = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, its weights in three shards."""
    folder = checkpoints["emoji"].copied(tmp_path / "copy").path
    rewrite(folder, torch.float32, 3)
    return folder


@pytest.fixture
def check(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """check_ckpts on the copy, no weights to be read: status, faults, standard error."""

    def call(*words: object) -> tuple[int, list[str], str]:
        with monkeypatch.context() as patch:
            patch.setattr(weights.Stored, "read", None)
            status, out, err = run("check_ckpts", "--model_path", copy, *words)
        document = json.loads(out.splitlines()[-1])
        parts = document["models"]["emoji"]
        assert document["ok"] == (status == 0)
        return status, [fault for part in parts for fault in part["faults"]], err

    return call


def not_loaded(folder: Path) -> str:
    """The one line in which loading refuses."""
    with pytest.raises(CheckpointError) as caught:
        load("emoji", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_wrong_and_nothing_read(check: Check, copy: Path) -> None:
    assert check() == (0, [], "")
    assert load("emoji", copy).codec


def test_every_shard_at_fault_is_named(check: Check, copy: Path) -> None:
    first, second, third = sorted(copy.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    status, faults, err = check()
    assert status == 2 and len(faults) == 2 and "2 in all" in err
    assert "does not exist" in faults[0] and first.name in faults[0]
    assert "truncated" in faults[1] and second.name in faults[1]
    assert first.name in not_loaded(copy) and "1 more" in not_loaded(copy)
    third.unlink()
    assert len(check()[1]) == 3


def configure(folder: Path, **changes: object) -> None:
    """Change a folder's config.json."""
    edit(folder, lambda config: config.update(changes))


def test_every_tensor_at_fault_is_named(check: Check, copy: Path) -> None:
    configure(copy, intermediate_size=32)
    status, faults, _ = check()
    assert status == 2 and len(faults) == 6  # three projections in two layers
    assert all("mlp" in fault and "config.json asks for" in fault for fault in faults)
    assert "mlp" in not_loaded(copy) and "(and 5 more of" in not_loaded(copy)
    configure(copy, intermediate_size=64, num_hidden_layers=3)
    assert all("model.layers.2." in fault and "missing" in fault for fault in check()[1])


def test_wrong_vocabulary(check: Check, copy: Path) -> None:
    configure(copy, vocab_size=400)
    faults = check()[1]
    assert [fault.split()[2] for fault in faults] == ["model.embed_tokens.weight", "lm_head.weight"]
    tokenizer = json.loads((copy / "text_tokenizer.json").read_text())
    configure(copy, vocab_size=len(tokenizer["model"]["vocab"]))
    words = tokenizer["model"]["vocab"]
    words["<racm3:break>"], words["<eoss>"] = words["<eoss>"], words["<racm3:break>"]
    (copy / "text_tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the text tokenizer has <racm3:break> at" in check()[1][0] and "<racm3:break>" in not_loaded(copy)
    words["beyond"] = 9999
    (copy / "text_tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token ids up to 9999" in check()[1][0]


def test_drafter_of_another_model(check: Check, copy: Path) -> None:
    drafter = copy / "drafter"
    configure(drafter, hidden_size=64)
    assert "belongs to another target" in check()[1][0] and "belongs to another target" in not_loaded(copy)
    configure(drafter, hidden_size=32)
    state = load_file(drafter / "model.safetensors")
    lost = "layers.0.input_layernorm.weight"  # as in LlamaGen's drafters
    save_file({n: t.contiguous() for n, t in state.items() if n != lost}, drafter / "model.safetensors")
    assert lost in check()[1][0] and "give the drafter of this model" in not_loaded(copy)
    assert check("--drafter_path", copy / "nowhere")[0] == 2


def test_no_drafter_is_no_fault_unless_asked_for(check: Check, copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "drafter", tmp_path / "away")
    assert check("--drafter_path", tmp_path / "away")[:2] == (0, [])


def test_table_of_another_codebook(check: Check, copy: Path) -> None:
    path = copy / "top_63_indices.npy"
    np.save(path, torch.zeros(32, 31).numpy().astype(np.uint16))
    assert "has 32 rows: the table of another codebook" in check()[1][0]
    path.write_bytes(path.read_bytes()[:50])
    assert "truncated" in check()[1][0]


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
