"""Every family's damaged inputs, by the command: one line that says what and what to do, and status 2."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from tests import published, tiny_llamagen
from tests.published import edit, rewrite

FORMS = ("anole", "lumina_mgpt", "llamagen folder", "llamagen file")


@dataclass(frozen=True)
class Files:
    """A sound checkpoint."""

    words: list[str]  # of the command, but for paths
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each form; do not write into them."""
    roots = {form: tmp_path_factory.mktemp("sound") for form in FORMS}
    for form in FORMS[:2]:
        published.build(roots[form], lumina=form == "lumina_mgpt")
    rewrite(tiny_llamagen.build(roots[FORMS[2]] / "target"), torch.float32, 2)
    tiny_llamagen.build(roots[FORMS[3]] / "target", wrapper="model")
    return roots


@pytest.fixture(params=FORMS)
def files(request: pytest.FixtureRequest, sound: dict[str, Path], tmp_path: Path) -> Files:
    """A copy to damage."""
    root = Path(shutil.copytree(sound[request.param], tmp_path / "copy"))
    if not request.param.startswith("llamagen"):
        home, size = root / "ckpts", ["--target_size", "8"] if request.param == "lumina_mgpt" else []
        return Files(
            ["--model", request.param, *size], home / "target", home / "trained_drafters" / "drafter"
        )
    file = "t2i.pt" if request.param.endswith("file") else ""
    return Files(["--model", "llamagen"], root / "target" / file, root / "target" / "drafter")


def weights(files: Files) -> Path:
    """The target's file, or its second shard."""
    return files.target if files.target.is_file() else sorted(files.target.glob("model-*.safetensors"))[1]


def missing(files: Files) -> list[str]:
    path = weights(files)
    path.unlink()
    return [path.name, "does not exist"]


def truncated(files: Files) -> list[str]:
    path = weights(files)
    path.write_bytes(path.read_bytes()[:-200])
    return [path.name, "truncated", "fetch it again"]


def shape(files: Files) -> list[str]:
    if files.target.is_dir():
        edit(files.target, lambda config: config.update(intermediate_size=40))
        return ["mlp", "config.json asks for [40, 32]", "fetch it again"]
    state = torch.load(files.target, weights_only=True)
    state["model"]["layers.1.feed_forward.w3.weight"] = torch.zeros(40, 32)
    torch.save(state, files.target)
    return ["layers.1.feed_forward.w3.weight", "is [40, 32]", "fetch it again"]


def vocabulary(files: Files) -> list[str]:
    if files.target.is_dir():
        edit(files.target, lambda config: config.update(vocab_size=config["vocab_size"] + 3))
        return (
            ["fetch it again"] if "anole" in files.words or "lumina_mgpt" in files.words else ["VQ decoder"]
        )
    state = torch.load(files.target, weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        state["model"][name] = torch.zeros(67, 32)
    torch.save(state, files.target)
    return ["67 codes", "VQ decoder has 64", "different models"]


def drafter(files: Files) -> list[str]:
    edit(files.drafter, lambda config: config.update(vocab_size=9, hidden_size=64))
    return [str(files.drafter), "belongs to another target"]


def truncated_drafter(files: Files) -> list[str]:
    path = files.drafter / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-200])
    return [path.name, "truncated", "fetch it again"]


def table(files: Files) -> list[str]:
    home = files.target if files.target.is_dir() else files.target.parent
    np.save(home / "top_63_indices.npy", np.zeros((32, 31), dtype=np.uint16))
    return ["top_63_indices.npy", "another codebook"]


def config(files: Files) -> list[str]:
    home = files.target if files.target.is_dir() else files.target.parent
    (home / "config.json").write_text(json.dumps([1]))
    return ["config.json", "not a JSON object", "fetch it again"]


@pytest.mark.parametrize(
    "damage", [missing, truncated, shape, vocabulary, drafter, truncated_drafter, table, config]
)
def test_one_line(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object) -> None:
    assert callable(damage)
    says = damage(files)
    capsys.readouterr()
    paths = ["--model_path", str(files.target), "--drafter_path", str(files.drafter)]
    words = [*files.words, *paths, "--drafter_type", "eagle", "--lantern", "--lantern_k", "9"]
    rest = ["--prompt", "sun", "--num_images", "1", "--output_dir", str(tmp_path / "out")]
    assert main.main(["generate_images", *words, *rest]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and all(word in lines[-1] for word in says), lines
    assert all(line.startswith("drafter alignment: ") for line in lines[:-1]), lines
