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

import main
from models.checkpoint import weights
from models.errors import CheckpointError
from tests.loading import load

Check = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, its weights in three shards."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    state, where = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(state.items())[number::3])
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], copy: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """check_ckpts on the copy, no weights to be read: status, faults, standard error."""

    def call(*words: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(weights.Stored, "read", None)
        status = main.main(["check_ckpts", "--model_path", str(copy), *words])
        out, err = capsys.readouterr()
        monkeypatch.undo()
        document = json.loads(out.splitlines()[-1])
        parts = document["models"]["emoji"]
        assert document["ok"] == (status == 0)
        return status, [fault for part in parts for fault in part["faults"]], err

    return call


def refused(folder: Path, drafter: str | None = None) -> str:
    """The one line in which loading refuses."""
    with pytest.raises(CheckpointError) as caught:
        load("emoji", str(folder), drafter, "fp32", "cpu", True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_wrong_and_nothing_read(check: Check, copy: Path) -> None:
    assert check() == (0, [], "")
    assert load("emoji", str(copy), None, "fp32", "cpu", True).codec


def test_every_shard_at_fault_is_named(check: Check, copy: Path) -> None:
    first, second, third = sorted(copy.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    status, faults, err = check()
    assert status == 2 and len(faults) == 2 and "2 in all" in err
    assert "does not exist" in faults[0] and first.name in faults[0]
    assert "truncated" in faults[1] and second.name in faults[1]
    assert first.name in refused(copy) and "1 more" in refused(copy)
    third.unlink()
    assert len(check()[1]) == 3


def configure(folder: Path, **changes: object) -> None:
    """Change a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_every_tensor_at_fault_is_named(check: Check, copy: Path) -> None:
    configure(copy, intermediate_size=32)
    status, faults, _ = check()
    assert status == 2 and len(faults) == 6  # three projections in two layers
    assert all("mlp" in fault and "config.json asks for" in fault for fault in faults)
    assert "mlp" in refused(copy) and "(and 5 more of" in refused(copy)
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
    assert "the text tokenizer has <racm3:break> at" in check()[1][0] and "<racm3:break>" in refused(copy)
    words["beyond"] = 9999
    (copy / "text_tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token ids up to 9999" in check()[1][0]


def test_drafter_of_another_model(check: Check, copy: Path) -> None:
    drafter = copy / "drafter"
    configure(drafter, hidden_size=64)
    assert "belongs to another target" in check()[1][0] and "belongs to another target" in refused(copy)
    configure(drafter, hidden_size=32)
    state = load_file(drafter / "model.safetensors")
    lost = "layers.0.input_layernorm.weight"  # as in LlamaGen's drafters
    save_file({n: t.contiguous() for n, t in state.items() if n != lost}, drafter / "model.safetensors")
    assert lost in check()[1][0] and "give the drafter of this model" in refused(copy)
    assert check("--drafter_path", str(copy / "nowhere"))[0] == 2


def test_no_drafter_is_no_fault_unless_asked_for(check: Check, copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "drafter", tmp_path / "away")
    assert check("--drafter_path", str(tmp_path / "away"))[:2] == (0, [])


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
def test_what_the_user_can_put_right(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main.main(["check_ckpts", *words]) == 2
    assert says in capsys.readouterr().err


def spoil(folder: Path, how: str) -> list[str]:
    """Damage a checkpoint; returns words that the line must hold."""
    second = folder / "model-00002-of-00003.safetensors"
    if how == "missing shard":
        second.unlink()
        return [second.name, "does not exist", "fetch it again"]
    if how == "truncated shard":
        second.write_bytes(second.read_bytes()[:-9])
        return [second.name, "truncated", "fetch it again"]
    if how == "wrong shape":
        configure(folder, intermediate_size=32)
        return ["mlp", "config.json asks for", "fetch it again"]
    if how == "wrong vocabulary":
        configure(folder, vocab_size=400)
        return ["embed_tokens", "config.json asks for", "the config.json that belongs to it"]
    if how == "drafter of another model":
        configure(folder / "drafter", hidden_size=64)
        return ["drafter", "belongs to another target"]
    np.save(folder / "top_63_indices.npy", np.full((63, 62), 1, dtype=np.uint16))
    return ["top_63_indices.npy", "another codebook", "leave it out"]


@pytest.mark.parametrize(
    "how",
    [
        "missing shard",
        "truncated shard",
        "wrong shape",
        "wrong vocabulary",
        "drafter of another model",
        "table",
    ],
)
def test_generate_images_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], copy: Path, tmp_path: Path, how: str
) -> None:
    says = spoil(copy, how)
    words = ["generate_images", "--model_path", str(copy), "--drafter_type", "eagle", "--lantern",
             "--prompt", "sun",
             "--num_images", "1", "--output_dir", str(tmp_path / "o")]  # fmt: skip
    assert main.main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in says), line
