"""Every family loads in the same way, by name or by folder, with a device and a precision. Its name stands in
few files of models/."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adt_tree.errors import CheckpointError
from adt_tree.method import METHODS, Method
from adt_tree.settings import Sampling
from models.checkpoint.weights import read_weights, weights_file
from models.family import LoadOptions, home_of
from models.loading import detect, find_files, load, pick_device, pick_precision
from models.registry import SPECS, spec_of
from tests.support.checkpoints import BUILD, Checkpoints
from tests.support.runs import ROOT

OPTIONS = LoadOptions(precision="fp32", device="cpu")


def test_every_family_is_recognised_in_its_folder(checkpoints: Checkpoints) -> None:
    assert {name.split()[0] for name in BUILD} == set(SPECS)
    for name in BUILD:
        path = checkpoints[name].path
        assert detect(path).name == name.split()[0], name
        if path.is_file():
            assert detect(path.parent).name == name.split()[0], name


@pytest.mark.parametrize("name", ["emoji", "llamagen", "llamagen classes"])
def test_a_folder_is_the_family_with_that_path(checkpoints: Checkpoints, name: str) -> None:
    path = str(checkpoints[name].path)
    direct, named = load(path, OPTIONS), load(name.split()[0], replace(OPTIONS, model_path=path))
    assert direct.spec == named.spec and direct.weights_sha == named.weights_sha
    assert direct.drafter_sha == named.drafter_sha is not None
    assert direct.weights_sha == read_weights(weights_file(Path(path))).digest()
    assert (direct.precision, direct.device.type) == ("fp32", "cpu")


def test_what_is_no_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    emoji = str(checkpoints["emoji"].path)
    copy = checkpoints["emoji"].copied(tmp_path / "copy").path
    unsized = checkpoints["llamagen file"].copied(tmp_path / "unsized").path
    for folder in (copy, unsized.parent):
        (folder / "config.json").write_text('{"n_head": 4}')
    nowhere = tmp_path / "nowhere"
    for model, options, named in (
        ("emojy", OPTIONS, "emojy"),
        ("emojy", replace(OPTIONS, model_path=str(copy)), "emojy"),
        (str(copy), OPTIONS, f"{copy}: .*model_path"),
        # A text-conditional model in a .pt could be LlamaGen's first stage or its second.
        (str(unsized), OPTIONS, str(unsized)),
        (str(nowhere), OPTIONS, str(nowhere)),
        (emoji, replace(OPTIONS, precision="fp8"), "precision fp8"),
        (emoji, replace(OPTIONS, device="tpu"), "device tpu"),
    ):
        with pytest.raises(CheckpointError, match=named) as caught:
            load(model, options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["emoji", "anole"])
def test_a_missing_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names get_ckpts.sh only for a family that it fetches."""
    monkeypatch.setattr("models.published.CKPTS", tmp_path)
    spec = replace(spec_of(name), home=tmp_path / name)
    with pytest.raises(CheckpointError, match=str(spec.target_folder)) as caught:
        find_files(spec, OPTIONS, "cpu", "fp32")
    assert (f"get_ckpts.sh {name}" in str(caught.value)) == (name == "anole")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1", "meta")] == [
        "cuda", "cpu", "cuda", "cuda:1", "meta"
    ]  # fmt: skip
    assert not placed
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == "cuda" and placed == [1]
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert pick_device("auto") == "cuda" and placed == [1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        assert pick_device("auto") == "cuda" and placed == [1, 1, 0]
    with pytest.raises(CheckpointError, match="device cuda:2"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(CheckpointError, match="device cuda"):
        pick_device("cuda")


@pytest.mark.parametrize("multiplies", [False, True])
def test_auto_precision(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": multiplies})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: multiplies)
    for model in ("emoji", "anole"):
        assert pick_precision("auto", "cuda", spec_of(model)) == ("bf16" if multiplies else "fp16")
    assert pick_precision("auto", "cpu", spec_of("anole")) == ("bf16" if multiplies else "fp32")
    assert pick_precision("auto", "cpu", spec_of("emoji")) == "fp32"
    assert pick_precision("bf16", "cpu", spec_of("emoji")) == "bf16"


@pytest.mark.parametrize("name", SPECS)
def test_a_family_has_a_tree_for_every_method(name: str) -> None:
    spec = spec_of(name)
    assert spec.method in METHODS
    for method in METHODS:
        Method(method, Sampling(), spec.default_tree(method))  # refuses a tree of the wrong kind


def test_no_other_file_knows_a_family_by_name() -> None:
    """Only the registry, the layout of its checkpoints and the table of models from transformers name a
    family."""
    shared = {"anole": "chameleon", "lumina_mgpt": "chameleon", "llamagen2": "llamagen"}  # layouts
    allowed = {name: {"registry", "adopted", shared.get(name, name)} for name in SPECS}
    for path in sorted((ROOT / "models").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        families = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & set(SPECS)
        assert all(path.stem in allowed[name] for name in families), f"{path.name}: {families}"


def test_nobodys_drafter_is_taken_for_anothers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The embedded model's drafter belongs to it alone, and a drafter beside a target to that target."""
    files = checkpoints["emoji"].copied(tmp_path / "copy")
    emoji = spec_of("emoji")
    assert find_files(emoji, LoadOptions(), "cpu", "fp32").drafter == emoji.home / "drafter"
    options = LoadOptions(model_path=files.path)
    assert find_files(emoji, options, "cpu", "fp32").drafter == home_of(files.path) / "drafter"
    shutil.rmtree(files.drafter)
    assert find_files(emoji, options, "cpu", "fp32").drafter is None
