"""Checkpoints in the published formats with other fields, sizes, dtypes and shards, and Anole's commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ChameleonForConditionalGeneration

from adt_tree.grid import Grid
from models.llama_names import decoder_names, scatter
from tests.conftest import Refused, Run
from tests.support import published, tiny, tiny_llamagen
from tests.support.checkpoints import Checkpoints, load
from tests.support.golden import same_as_transformers
from tests.support.published import edit, rewrite

FIELDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as written": lambda config: None,
    "no rope_theta": lambda config: config.pop("rope_theta"),
    "rope_parameters": lambda config: config.update(
        rope_parameters={"rope_type": "default", "rope_theta": config.pop("rope_theta")}, dtype="float32"
    ),
    "another rope_theta": lambda config: config.update(rope_theta=300.0),
    "another in rope_parameters": lambda config: config.update(
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, rope_theta=None
    ),
    "rope_scaling null": lambda config: config.update(rope_scaling=None),
    "head_dim": lambda config: config.update(head_dim=8),
    "no architectures": lambda config: (config.pop("architectures"), config.pop("tie_word_embeddings")),
    "no norms' epsilon": lambda config: config.pop("rms_norm_eps"),
    "no switches": lambda config: [
        config.pop(name) for name in ("attention_bias", "mlp_bias", "hidden_act", "swin_norm")
    ],
}


def check(folder: Path) -> None:
    """Compares a folder with transformers along random tokens, and the exported tensors with those in the
    folder."""
    theirs = ChameleonForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 60, (2, 19), generator=torch.Generator().manual_seed(5))
    model, state = load("anole", folder, need_drafter=False), theirs.state_dict()
    same_as_transformers(model, theirs, ids)
    ours = model.decoder
    state["lm_head.weight"] = state["lm_head.weight"][model.first_code : model.first_code + model.num_codes]
    for name, tensor in scatter(ours.state_dict(), decoder_names(ours.config), ours.config).items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("style", FIELDS)
def test_fields_of_either_style(checkpoints: Checkpoints, tmp_path: Path, style: str) -> None:
    folder = checkpoints["emoji"].copied(tmp_path / "copy").path
    edit(folder / "config.json", FIELDS[style])
    check(folder)


@pytest.mark.parametrize(
    ("sizes", "dtype", "shards", "leave"),
    [
        ({"num_key_value_heads": 2, "num_hidden_layers": 3}, torch.bfloat16, 1, ""),
        ({"num_key_value_heads": 1, "num_hidden_layers": 1, "rope_theta": 500}, torch.float16, 2, ""),
        ({"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, torch.float16, 3, ""),
        ({"intermediate_size": 40, "tie_word_embeddings": True}, torch.bfloat16, 5, "lm_head.weight"),
    ],
)
def test_sizes_types_shards(
    tmp_path: Path, sizes: dict[str, int], dtype: torch.dtype, shards: int, leave: str
) -> None:
    folder = tiny.build(tmp_path / "x", **sizes)
    file = folder / "model.safetensors"
    state = {name: t + ("norm" in name) * 0.3 * torch.randn_like(t) for name, t in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    rewrite(folder, dtype, shards, leave)
    check(folder)


@pytest.mark.parametrize("leave", ["", "lm_head.weight"])
def test_llamagen_in_shards_of_bf16(tmp_path: Path, leave: str) -> None:
    """A folder that transformers sharded loads with or without a tied head, and without some fields of its
    configuration."""
    whole = load("llamagen", tiny_llamagen.build(tmp_path / "whole", 4, num_key_value_heads=2))
    folder = tiny_llamagen.build(tmp_path / "shards", 4, num_key_value_heads=2)
    rewrite(folder, torch.bfloat16, 3, leave)

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = bool(leave)
        for name in ("rms_norm_eps", "rope_base", "architectures"):
            del config[name]

    edit(folder / "config.json", change)
    model = load("llamagen", folder)
    actual, expected = model.decoder.state_dict(), dict(whole.decoder.state_dict())
    if leave:
        expected["head.weight"] = expected["embed.weight"]
    assert all(torch.equal(actual[name], expected[name].bfloat16().float()) for name in expected)
    assert model.decoder.config.norm_eps == 1e-6 and model.decoder.config.rope_theta == 10000


CAPTIONS = {"images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
            "annotations": [{"id": 501, "image_id": 9, "caption": "a cat on the hat"},
                            {"id": 502, "image_id": 9, "caption": "not the first"},
                            {"id": 377, "image_id": 4, "caption": "the ocean"}]}  # fmt: skip


def test_the_readme_command_of_adt_tree(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The command is as published, except for paths and k, because this codebook has 64 codes. Images are
    named by annotation; statistics and configuration have the published names."""
    (tmp_path / "captions_val2017.json").write_text(json.dumps(CAPTIONS))
    anole, out = checkpoints["anole"], tmp_path / "out"
    words = f"""generate_images --prompt MSCOCO2017Val --model anole --temperature 1 --model_type eagle
        --model_path {anole.path} --drafter_path {anole.drafter} --output_dir {out} --lantern --peanut
        --lantern_k 20 --lantern_delta 0.5 --num_images -1 --prompt_dir {tmp_path}"""
    assert run(*words.split())[0] == 0
    assert {path.name for path in (out / "img").iterdir()} == {"501.png", "377.png"}
    statistics = json.loads((out / "global_statistics_0_10000.json").read_text())
    assert [entry["ann_id"] for entry in statistics.values()] == [501, 377]
    for entry, text in zip(statistics.values(), ("a cat on the hat", "the ocean"), strict=True):
        assert entry["prompt"] == text and entry["acceptance_length"] >= 1 and entry["time"] > 0
    options = json.loads((out / "generation_configs.json").read_text())
    assert (options["model"], options["lantern_delta"], options["peanut"]) == ("anole", 0.5, True)


def test_the_layout_does_not_matter(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """One file with a codec inside, and shards with Meta's VQGAN, give the same pictures."""
    pictures = []
    for name in ("emoji", "anole"):
        out = tmp_path / name
        rest = ["--prompt", "cat", "--num_images", "2", "--model_type", "base", "--output_dir", out]
        assert run("generate_images", *checkpoints[name].words(), *rest)[0] == 0
        pictures.append([(out / "img" / f"{n}.png").read_bytes() for n in range(2)])
    assert pictures[0] == pictures[1] and pictures[0][0] != pictures[0][1]


def test_prompts_of_lumina_mgpt(checkpoints: Checkpoints) -> None:
    model = checkpoints["lumina_mgpt"].load()
    words = tiny.vocabulary() | {name: len(tiny.vocabulary()) + n for n, name in enumerate(published.LUMINA)}
    prompt = model.encode("cat")
    opening = [words["<racm3:break>"], words["<reserved08802>"], words["<reserved08802>"]]
    text = "Generate an image of 8x8 according to the following prompt:\ncat"
    ids = [words[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in text]
    assert prompt.unconditional == opening
    assert prompt.conditional == [words["<s>"], *ids, words["<reserved08706>"], *opening]
    assert model.prompts.row_end == words["<reserved08799>"] and model.grid == Grid(4, 4, row_ends=True)


def test_where_the_tokenizer_may_lie(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    anole = checkpoints["anole"].copied(tmp_path / "copy")
    base = Path(shutil.move(anole.path.parent / "chameleon", tmp_path / "base" / "chameleon"))
    words = ["generate_images", *anole.words(), "--prompt", "cat", "--model_type", "base"]
    words += ["--num_images", "1", "--output_dir", tmp_path / "out", "--tokenizer_base_path"]
    assert "tokenizer.json" in refused(*words, tmp_path / "base")
    shutil.copy(anole.path / "tokenizer.json", base / "tokenizer" / "text_tokenizer.json")
    assert run(*words, tmp_path / "base")[0] == 0
