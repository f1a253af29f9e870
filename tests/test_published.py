"""Anole and Lumina-mGPT from the published layouts: commands, what is missing. Random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from models.errors import CheckpointError
from tests import published, tiny
from tests.checkpoints import Checkpoints, load
from tests.conftest import Refused, Run

CAPTIONS = {"images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
            "annotations": [{"id": 501, "image_id": 9, "caption": "a cat on the hat"},
                            {"id": 502, "image_id": 9, "caption": "not the first"},
                            {"id": 377, "image_id": 4, "caption": "the ocean"}]}  # fmt: skip


def test_the_readme_command_of_adt_tree(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As published but for its paths and k, as the codebook has 64 codes: images by annotation, statistics
    and configuration under its names."""
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
    """The same weights as one file with a decoder inside, and as shards with Meta's VQGAN: one picture."""
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
    assert model.row_end == words["<reserved08799>"] and (model.grid.height, model.grid.width) == (4, 4)


def test_sizes_of_lumina_mgpt(run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path) -> None:
    words = [
        "generate_images",
        *checkpoints["lumina_mgpt"].words(),
        "--model_type",
        "base",
        "--prompt",
        "cat",
    ]
    words += ["--num_images", "1", "--output_dir", tmp_path / "o"]
    assert run(*words, "--cfg_mode", "sequential")[0] == 0
    words[-1] = tmp_path / "x"
    assert "multiple of 4" in refused(*words, "--target_size", "10")
    assert "<reserved08805>" in refused(*words, "--target_size", "20")


def test_what_is_missing_is_named(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    target, ckpts = tmp_path / "target", checkpoints["anole"].path.parent
    shutil.copytree(ckpts / "target", target)
    words = ["generate_images", "--model", "anole", "--prompt", "cat", "--model_type", "base", "--num_images",
             "1", "--output_dir", tmp_path / "out", "--model_path", target]  # fmt: skip
    assert "vqgan.ckpt" in refused(*words)
    shutil.copy(ckpts / "chameleon" / "tokenizer" / "vqgan.ckpt", target)
    assert "vqgan.yaml" in refused(*words)
    (target / "vqgan.yaml").write_text("model: []")
    assert "does not describe a VQGAN" in refused(*words)
    assert "tokenizer.json" in refused(*words, "--tokenizer_base_path", ckpts)
    base = Path(shutil.copytree(ckpts / "chameleon", tmp_path / "base" / "chameleon")) / "tokenizer"
    shutil.copy(target / "tokenizer.json", base / "text_tokenizer.json")
    assert run(*words, "--tokenizer_base_path", tmp_path / "base")[0] == 0


def test_the_other_family_is_refused(checkpoints: Checkpoints) -> None:
    """Either would run as the other: the norms tell them apart."""
    for name, other in (("anole", "lumina_mgpt"), ("lumina_mgpt", "anole")):
        with pytest.raises(CheckpointError, match=f"no checkpoint of {name}, try --model {other}"):
            load(name, checkpoints[other].path, need_drafter=False)


def test_another_codebook_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints["anole"].path.parent, tmp_path / "ckpts")
    path = tmp_path / "ckpts" / "chameleon" / "tokenizer" / "vqgan.ckpt"
    state = torch.load(path, weights_only=True)
    state["state_dict"]["quantize.embedding.weight"] += 1
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="codebook"):
        load("anole", tmp_path / "ckpts" / "target", need_drafter=False)
