"""Every family's damaged, truncated and mistaken inputs, by the command: one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import Checkpoints, Tiny
from tests.conftest import Refused
from tests.published import edit, rewrite

Damage = Callable[[Tiny], list[str]]  # spoils a copy; returns words that the line must hold


def generate(refused: Refused, files: Tiny, *words: object) -> str:
    """The one line that generating ends with."""
    fixed = ["generate_images", *files.words(), "--prompt", "sun", "--num_images", "1"]
    return refused(*fixed, "--output_dir", files.drafter.parent / "out", *words)


def home(files: Tiny) -> Path:
    """The folder of the target."""
    return files.path if files.path.is_dir() else files.path.parent


def weights(files: Tiny) -> Path:
    """The target's file, or its last shard."""
    return files.path if files.path.is_file() else max(files.path.glob("model*.safetensors"))


def missing(files: Tiny) -> list[str]:
    path = weights(files)
    path.unlink()
    return [path.name, "does not exist"]


def truncated(files: Tiny) -> list[str]:
    path = weights(files)
    path.write_bytes(path.read_bytes()[:-200])
    return [path.name, "truncated", "fetch it again"]


def shape(files: Tiny) -> list[str]:
    if files.path.is_dir():
        edit(files.path, lambda config: config.update(intermediate_size=40))
        return ["mlp", "config.json asks for [40, 32]", "fetch it again"]
    state = torch.load(files.path, weights_only=True)
    state["layers.1.feed_forward.w3.weight"] = torch.zeros(40, 32)
    torch.save(state, files.path)
    return ["layers.1.feed_forward.w3.weight", "is [40, 32]", "fetch it again"]


def vocabulary(files: Tiny) -> list[str]:
    if files.path.is_dir():
        edit(files.path, lambda config: config.update(vocab_size=config["vocab_size"] + 3))
        return ["fetch it again"]
    state = torch.load(files.path, weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        state[name] = torch.zeros(67, 32)
    torch.save(state, files.path)
    return ["67 codes", "VQ decoder has 64", "different models"]


def drafter(files: Tiny) -> list[str]:
    edit(files.drafter, lambda config: config.update(vocab_size=9, hidden_size=64))
    return [str(files.drafter), "belongs to another target"]


def truncated_drafter(files: Tiny) -> list[str]:
    path = files.drafter / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-200])
    return [path.name, "truncated", "fetch it again"]


def table(files: Tiny) -> list[str]:
    np.save(home(files) / "top_63_indices.npy", np.zeros((32, 31), dtype=np.uint16))
    return ["top_63_indices.npy", "another codebook", "leave it out"]


def config(files: Tiny) -> list[str]:
    (home(files) / "config.json").write_text(json.dumps([1]))
    return ["config.json", "not a JSON object", "fetch it again"]


@pytest.mark.parametrize(
    "damage", [missing, truncated, shape, vocabulary, drafter, truncated_drafter, table, config]
)
@pytest.mark.parametrize("name", ["anole", "lumina_mgpt", "llamagen", "llamagen file"])
def test_released_layouts(
    name: str, damage: Damage, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    files = checkpoints[name].copied(tmp_path / "copy")
    if name == "llamagen":
        rewrite(files.path, torch.float32, 2)
    says = damage(files)
    words = ["--drafter_path", files.drafter, "--drafter_type", "eagle", "--drafter_alignment", "published"]
    line = generate(refused, files, *words, "--lantern", "--lantern_k", "9")
    assert all(word in line for word in says), line


HEADS = {"janus_pro": "model.generation_head.vision_head.weight", "emu3": "text_model.lm_head.weight"}
CODEC = {"janus_pro": "model.vqmodel.decoder.conv_in.weight", "emu3": "vqmodel.decoder.conv_in.weight"}


def leave_out(files: Tiny, name: str) -> list[str]:
    """Write the weights anew without one tensor."""
    state = load_file(files.path / "model.safetensors")
    del state[name]
    save_file(state, files.path / "model.safetensors", metadata={"format": "pt"})
    return [name, "is missing", "fetch it again"]


def no_weights(files: Tiny) -> list[str]:
    (files.path / "model.safetensors").unlink()
    return [str(files.path), "no model.safetensors"]


def no_head(files: Tiny) -> list[str]:
    return leave_out(files, HEADS[files.family])


def no_codec(files: Tiny) -> list[str]:
    return leave_out(files, CODEC[files.family])


def inner_shape(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config["text_config"].update(intermediate_size=40))
    return ["mlp.gate_proj.weight", "config.json asks for [40, 32]", "fetch it again"]


def no_sections(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config.update(vq_config=[3]))
    return ["config.json", "vq_config is [3]"]


def senseless(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config["text_config"].update(num_hidden_layers=-1))
    return ["config.json", "num_hidden_layers is -1"]


def no_tokenizer(files: Tiny) -> list[str]:
    for file in files.path.glob("tokenizer*"):
        file.unlink()
    return [str(files.path), "no tokenizer.json", "fetch"]


def broken_tokenizer(files: Tiny) -> list[str]:
    (files.path / "tokenizer.json").write_text("{")
    return [str(files.path), "tokenizer cannot be read"]


def no_template(files: Tiny) -> list[str]:
    (files.path / "chat_template.jinja").unlink()
    return ["no chat template"]


def broken_template(files: Tiny) -> list[str]:
    (files.path / "chat_template.jinja").write_text("{% for %}")
    return ["chat template fails"]


def no_padding(files: Tiny) -> list[str]:
    path = files.path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 10**6}))
    return ["pad_token_id is 1000000"]


def wide_aligner(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config["vq_config"].update(projection_dim=48))
    return ["vq_config.projection_dim is 48"]


def no_separator(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config["vocabulary_map"].pop("<|extra_200|>"))
    return ["<|extra_200|> is missing"]


def swapped_codes(files: Tiny) -> list[str]:
    def swap(config: dict) -> None:
        words = config["vocabulary_map"]
        one, other = (f"<|visual token {code:06d}|>" for code in (3, 4))
        words[one], words[other] = words[other], words[one]

    edit(files.path, swap)
    return ["out of order"]


def other_tokenizer(files: Tiny) -> list[str]:
    edit(files.path, lambda config: config["vocabulary_map"].update({"<|extra_200|>": 5}))
    return ["the tokenizer has <|extra_200|> at"]


BOTH: tuple[Damage, ...] = (
    no_weights, truncated, no_head, no_codec, inner_shape, config, no_sections, senseless, no_tokenizer,
    broken_tokenizer,
)  # fmt: skip
SAVED = [(name, damage) for name in HEADS for damage in BOTH]
SAVED += [("janus_pro", damage) for damage in (no_template, broken_template, no_padding, wide_aligner)]
SAVED += [("emu3", damage) for damage in (no_separator, swapped_codes, other_tokenizer)]


@pytest.mark.parametrize(("name", "damage"), SAVED)
def test_layouts_of_transformers(
    name: str, damage: Damage, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    files = checkpoints[name].copied(tmp_path / "copy")
    says = damage(files)
    line = generate(refused, files)
    assert all(word in line for word in says), line


@pytest.mark.parametrize(
    ("name", "other"),
    [("janus_pro", "emu3"), ("emu3", "janus_pro"), ("janus_pro", "anole"), ("anole", "emu3")],
)
def test_another_familys_folder(
    name: str, other: str, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    words = ["--model_path", checkpoints[other].path, "--output_dir", tmp_path / "o"]
    assert "config.json" in generate(refused, checkpoints[name], *words)


def test_sizes(checkpoints: Checkpoints, refused: Refused) -> None:
    """Janus has one; Emu3 makes whole cells; a ratio belongs to Emu3."""
    janus, emu3 = checkpoints["janus_pro"], checkpoints["emu3"]
    assert "draws 8 px" in generate(refused, janus, "--target_size", "16")
    assert "--ratio 0:3" in generate(refused, emu3, "--ratio", "0:3")
    assert "no whole cell" in generate(refused, emu3, "--target_size", "1", "--ratio", "9:1")
    assert "--ratio" in generate(refused, janus, "--ratio", "1:1")
