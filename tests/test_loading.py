"""Every family loads in one way: by name or folder, device and precision settled; a family is one file."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from adt_tree.method import METHODS, Method
from adt_tree.sampling import Sampling
from models.errors import CheckpointError
from models.loading import detect, load, pick_device
from models.model import Model
from models.registry import SPECS, spec_of
from models.spec import LoadOptions, ModelSpec
from tests import published, tiny, tiny_emu3, tiny_janus, tiny_llamagen

ROOT = Path(__file__).resolve().parent.parent
HOW = LoadOptions(precision="fp32", device="cpu", token_shift="published")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every family, by its name; a class-conditional and a lone .pt of LlamaGen."""
    root = tmp_path_factory.mktemp("families")
    found = {"emoji": tiny.build(root / "emoji"), "llamagen": tiny_llamagen.build(root / "llamagen")}
    for name in ("anole", "lumina_mgpt"):
        found[name] = published.build(root / name, lumina=name == "lumina_mgpt")[0]
    found |= {"janus_pro": tiny_janus.build(root / "janus"), "emu3": tiny_emu3.build(root / "emu3")}
    found["llamagen2"] = tiny_llamagen.build(root / "llamagen2", block_size=1024, input_type="t2i2")
    found["llamagen classes"] = tiny_llamagen.build(root / "classes", wrapper="model", cls_token_num=1)
    found["llamagen file"] = tiny_llamagen.build(root / "file", wrapper="")
    return found


def test_every_family_is_recognised_in_its_folder(folders: dict[str, Path]) -> None:
    assert {name.split()[0] for name in folders} == set(SPECS)
    for name, folder in folders.items():
        assert detect(folder).name == name.split()[0], name
        if folder.is_file():
            assert detect(folder.parent).name == name.split()[0], name


@pytest.mark.parametrize("name", ["emoji", "llamagen", "llamagen classes"])
def test_a_folder_is_the_family_with_that_path(folders: dict[str, Path], name: str) -> None:
    direct = load(str(folders[name]), HOW)
    named = load(name.split()[0], replace(HOW, model_path=str(folders[name])))
    assert direct.spec == named.spec and direct.weights_sha == named.weights_sha
    assert direct.drafter_sha == named.drafter_sha is not None
    assert (direct.precision, direct.device.type) == ("fp32", "cpu")


def test_what_is_no_model(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folders["emoji"], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({key: config[key] for key in ("hidden_size", "vocab_size")}))
    lone = folders["llamagen file"].parent
    unsized = Path(shutil.copytree(lone, tmp_path / "unsized"))
    (unsized / "config.json").write_text('{"n_head": 4}')
    for model, options, says in (
        ("emojy", HOW, "there is no model emojy: choose one of emoji, anole"),
        ("emojy", replace(HOW, model_path=str(copy)), "there is no model emojy"),
        (str(copy), HOW, "do not tell which model it is: give it as --model_path"),
        (str(unsized), HOW, "do not tell which model it is"),  # a .pt of texts could be of either stage
        (str(tmp_path / "nowhere"), HOW, "there is no model"),
        (str(folders["emoji"]), replace(HOW, precision="fp8"), "--precision fp8: choose one of auto, bf16"),
        (str(folders["emoji"]), replace(HOW, device="tpu"), "--device tpu: choose auto, cpu, cuda"),
        (str(folders["emoji"]), replace(HOW, device_map="auto"), "needs two CUDA devices or more"),
        (str(folders["llamagen"]), replace(HOW, device_map="row"), "auto is the only one"),
    ):
        with pytest.raises(CheckpointError) as caught:
            load(model, options)
        assert says in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1", "meta")] == [
        "cuda", "cpu", "cuda", "cuda:1", "meta"
    ]  # fmt: skip
    assert not placed
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == "cuda" and placed == [1]
    for rank, says in (("2", "LOCAL_RANK=2, but 2 CUDA devices"), ("x", "LOCAL_RANK='x'")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(CheckpointError, match=says):
            pick_device("auto")
    with pytest.raises(CheckpointError, match="cuda:2: 2 CUDA devices"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(CheckpointError, match="no CUDA device is visible"):
        pick_device("cuda")


@pytest.mark.parametrize("name", SPECS)
def test_a_family_has_a_tree_for_every_method(name: str) -> None:
    spec = spec_of(name)
    assert spec.method in METHODS
    for method in METHODS:
        Method(method, Sampling(), spec.default_tree(method))  # refuses a tree of the wrong kind


def test_no_other_file_knows_a_family_by_name() -> None:
    """A name of a family in code is in its own file, its checkpoint's layout or the list of families."""
    own = {"emoji": {"anole"}, "anole": {"anole"}, "lumina_mgpt": {"lumina_mgpt"}}
    own |= {"janus_pro": {"janus_pro", "adopted"}, "emu3": {"emu3", "adopted"}}
    may = {name: own.get(name, {"llamagen"}) for name in SPECS}
    for path in sorted((ROOT / "models").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & set(SPECS)
        allowed = {name for name in found if path.stem in may[name]}
        hints = {"chameleon_files": {"anole", "lumina_mgpt"}, "loading": {"emoji"}, "adopted": {"anole"}}.get(
            path.stem, set()
        )
        assert found <= allowed | hints, f"{path.name}: {found - allowed}"


def test_options_are_checked_without_torch() -> None:
    script = "import sys, models.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert {field.name for field in fields(ModelSpec)} >= {"load", "recognises", "tree", "method"}


def test_loading_needs_no_drafter(folders: dict[str, Path]) -> None:
    model = load(str(folders["emoji"]), replace(HOW, need_drafter=False))
    assert isinstance(model, Model) and model.drafter_net is None
    with pytest.raises(CheckpointError, match="loaded without a drafter"):
        model.drafter(model.target(1, Sampling(), 1, 9), 1, 1)
