"""Damaged, truncated and mistaken folders of Janus-Pro and Emu3, by the command: one line, status 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import main
from tests import published, tiny_emu3, tiny_janus
from tests.published import edit

BUILD = {"janus_pro": tiny_janus.build, "emu3": tiny_emu3.build}
HEADS = {"janus_pro": "model.generation_head.vision_head.weight", "emu3": "text_model.lm_head.weight"}
CODEC = {"janus_pro": "model.vqmodel.decoder.conv_in.weight", "emu3": "vqmodel.decoder.conv_in.weight"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family; do not write into them."""
    root = tmp_path_factory.mktemp("sound")
    made = {name: build(root / name) for name, build in BUILD.items()}
    return made | {"anole": published.build(root / "anole", lumina=False)[0]}


def refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that generating ends with."""
    size = ["--target_size", "8"] if name == "emu3" and "--target_size" not in words else []
    fixed = ["generate_images", "--model", name, "--model_path", str(folder), "--prompt", "sun", *size]
    capsys.readouterr()
    assert main.main([*fixed, "--num_images", "1", "--output_dir", str(folder / "out"), *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def leave_out(folder: Path, name: str) -> None:
    """Write the weights anew without one tensor."""
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def missing(folder: Path, name: str) -> list[str]:
    (folder / "model.safetensors").unlink()
    return [str(folder), "no model.safetensors"]


def truncated(folder: Path, name: str) -> list[str]:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-200])
    return ["model.safetensors", "truncated", "fetch it again"]


def no_head(folder: Path, name: str) -> list[str]:
    leave_out(folder, HEADS[name])
    return [HEADS[name], "is missing", "fetch it again"]


def no_codec(folder: Path, name: str) -> list[str]:
    leave_out(folder, CODEC[name])
    return [CODEC[name], "is missing", "fetch it again"]


def shape(folder: Path, name: str) -> list[str]:
    edit(folder, lambda config: config["text_config"].update(intermediate_size=40))
    return ["mlp.gate_proj.weight", "config.json asks for [40, 32]", "fetch it again"]


def not_an_object(folder: Path, name: str) -> list[str]:
    (folder / "config.json").write_text("[1]")
    return ["config.json", "not a JSON object"]


def no_sections(folder: Path, name: str) -> list[str]:
    edit(folder, lambda config: config.update(vq_config=[3]))
    return ["config.json", "vq_config is [3]"]


def senseless(folder: Path, name: str) -> list[str]:
    edit(folder, lambda config: config["text_config"].update(num_hidden_layers=-1))
    return ["config.json", "num_hidden_layers is -1"]


def no_tokenizer(folder: Path, name: str) -> list[str]:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return [str(folder), "no tokenizer.json", "fetch"]


def broken_tokenizer(folder: Path, name: str) -> list[str]:
    (folder / "tokenizer.json").write_text("{")
    return [str(folder), "tokenizer cannot be read"]


EVERY: tuple[Callable[[Path, str], list[str]], ...] = (
    missing, truncated, no_head, no_codec, shape, not_an_object, no_sections, senseless, no_tokenizer,
    broken_tokenizer,
)  # fmt: skip


@pytest.mark.parametrize("damage", EVERY)
@pytest.mark.parametrize("name", BUILD)
def test_damaged(
    name: str,
    damage: Callable[[Path, str], list[str]],
    sound: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(sound[name], tmp_path / "copy"))
    says = damage(folder, name)
    line = refused(name, folder, capsys)
    assert all(word in line for word in says), line


@pytest.mark.parametrize(
    ("name", "other"),
    [("janus_pro", "emu3"), ("emu3", "janus_pro"), ("janus_pro", "anole"), ("anole", "emu3")],
)
def test_another_familys_folder(
    name: str, other: str, sound: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "config.json" in refused(name, sound[other], capsys)


def no_template(folder: Path) -> str:
    (folder / "chat_template.jinja").unlink()
    return "no chat template"


def broken_template(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{% for %}")
    return "chat template fails"


def no_padding(folder: Path) -> str:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 10**6}))
    return "pad_token_id is 1000000"


def wide_aligner(folder: Path) -> str:
    edit(folder, lambda config: config["vq_config"].update(projection_dim=48))
    return "vq_config.projection_dim is 48"


@pytest.mark.parametrize("damage", [no_template, broken_template, no_padding, wide_aligner])
def test_janus_text_side(
    damage: Callable[[Path], str], sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(sound["janus_pro"], tmp_path / "copy"))
    assert damage(folder) in refused("janus_pro", folder, capsys)


def no_row_end(folder: Path) -> str:
    edit(folder, lambda config: config["vocabulary_map"].pop("<|extra_200|>"))
    return "<|extra_200|> is missing"


def swapped_codes(folder: Path) -> str:
    def swap(config: dict) -> None:
        words = config["vocabulary_map"]
        one, other = (f"<|visual token {code:06d}|>" for code in (3, 4))
        words[one], words[other] = words[other], words[one]

    edit(folder, swap)
    return "out of order"


def other_tokenizer(folder: Path) -> str:
    edit(folder, lambda config: config["vocabulary_map"].update({"<|extra_200|>": 5}))
    return "the tokenizer has <|extra_200|> at"


@pytest.mark.parametrize("damage", [no_row_end, swapped_codes, other_tokenizer])
def test_emu3_vocabulary(
    damage: Callable[[Path], str], sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(sound["emu3"], tmp_path / "copy"))
    assert damage(folder) in refused("emu3", folder, capsys)


def test_sizes(sound: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Janus has one; Emu3 draws whole cells; a ratio belongs to Emu3."""
    assert "draws 8 px" in refused("janus_pro", sound["janus_pro"], capsys, "--target_size", "16")
    assert "--ratio 0:3" in refused("emu3", sound["emu3"], capsys, "--ratio", "0:3")
    assert "no whole cell" in refused("emu3", sound["emu3"], capsys, "--target_size", "1", "--ratio", "9:1")
    assert "--ratio" in refused("janus_pro", sound["janus_pro"], capsys, "--ratio", "1:1")
