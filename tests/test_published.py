"""Anole and Lumina-mGPT from the published layouts: commands, exactness, what is missing. Random weights."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import main
from adt_tree.method import Method, build
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.roles import Request
from models.errors import CheckpointError
from models.model import Model
from models.spec import LoadOptions
from tests import published, tiny
from tests.loading import load
from tests.methods import method_of

CAPTIONS = {"images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
            "annotations": [{"id": 501, "image_id": 9, "caption": "a cat on the hat"},
                            {"id": 502, "image_id": 9, "caption": "not the first"},
                            {"id": 377, "image_id": 4, "caption": "the ocean"}]}  # fmt: skip
SIZES = {"lumina_mgpt": 8}
ADAPT = AdaptiveTree(depth_max=6, width_max=4, depth_start=4, width_start=3, budget=14)
DRAFTED: dict[str, dict[str, Any]] = {
    "eagle": {"shape": TreeShape(5, 4, 14)},
    "eagle static": {"static": "mc_sim_7b_63"},
    "eagle adaptive": {"adapt": ADAPT},
    "self-drafted": {"shape": TreeShape(9, 3, 20), "drafter": "self-draft"},
    "hybrid": {"shape": TreeShape(9, 3, 20), "drafter": "hybrid"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Targets and drafters by model; do not write into them."""
    return {
        name: published.build(tmp_path_factory.mktemp(name), lumina=name == "lumina_mgpt")
        for name in ("anole", "lumina_mgpt")
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, tuple[Path, Path]]) -> dict[str, Model]:
    """Both, loaded: grids of 4 x 4."""
    return {
        name: load(
            name, str(target), str(drafter), "fp32", "cpu", True, LoadOptions(target_size=SIZES.get(name))
        )
        for name, (target, drafter) in folders.items()
    }


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that ends with status 2."""
    assert main.main(["generate_images", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_readme_command_of_adt_tree(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """As published but for its paths: images by annotation, statistics and configuration under its names."""
    (tmp_path / "captions_val2017.json").write_text(json.dumps(CAPTIONS))
    target, drafter = map(str, folders["anole"])
    out = tmp_path / "out"
    words = f"""generate_images --prompt MSCOCO2017Val --model anole --temperature 1 --model_type eagle
        --model_path {target} --drafter_path {drafter} --output_dir {out} --lantern --peanut
        --lantern_k 100 --lantern_delta 0.5 --num_images -1 --prompt_dir {tmp_path}"""
    words = words.replace("--lantern_k 100", "--lantern_k 20")  # the codebook has 64 codes
    assert main.main(words.split()) == 0
    assert {path.name for path in (out / "img").iterdir()} == {"501.png", "377.png"}
    statistics = json.loads((out / "global_statistics_0_10000.json").read_text())
    assert [entry["ann_id"] for entry in statistics.values()] == [501, 377]
    for entry, text in zip(statistics.values(), ("a cat on the hat", "the ocean"), strict=True):
        assert entry["prompt"] == text and entry["acceptance_length"] >= 1 and entry["time"] > 0
    options = json.loads((out / "generation_configs.json").read_text())
    assert (options["model"], options["lantern_delta"], options["peanut"]) == ("anole", 0.5, True)


def test_the_layout_does_not_matter(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """The same weights as one file with a decoder inside, and as shards with Meta's VQGAN: one picture."""
    whole, pictures = tiny.build(tmp_path / "whole"), []
    for number, words in enumerate(
        (f"--model_path {whole}", f"--model anole --model_path {folders['anole'][0]}")
    ):
        out = tmp_path / str(number)
        rest = f"--prompt cat --num_images 2 --model_type base --precision fp32 --output_dir {out}"
        assert main.main(f"generate_images {words} {rest}".split()) == 0
        pictures.append([(out / "img" / f"{n}.png").read_bytes() for n in range(2)])
    assert pictures[0] == pictures[1] and pictures[0][0] != pictures[0][1]


def law(temperature: float) -> dict[str, float]:
    """The published defaults."""
    return {"temperature": temperature, "top_k": 2000, "top_p": 1.0, "cfg": 3.0}


def drawn(model: Model, method: Method, slots: int) -> dict[str, list[int]]:
    """Four images by name, prompts of different lengths."""
    texts = ("cat", "a very long caption of a cat on a hat", "x", "the ocean")
    requests = [Request(text, model.encode(text), 31 * n) for n, text in enumerate(texts)]
    longest = max(request.prompt.length for request in requests)
    decoded = list(build(model, method, slots, longest).decode(iter(requests)))
    if method.needs_drafter:  # random weights have no images in which stale codes come true
        assert sum(image.target_calls for image in decoded) < 4 * (model.grid.size - 1)
    return {image.name: image.codes for image in decoded}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["anole", "lumina_mgpt"])
def test_every_exact_method_draws_the_image_of_plain_decoding(
    models: dict[str, Model], name: str, temperature: float
) -> None:
    """Token for token in fp32 under guidance, alone and three at a time."""
    expected = drawn(models[name], method_of(**law(temperature)), 1)
    assert len({tuple(codes) for codes in expected.values()}) == 4
    assert drawn(models[name], method_of(**law(temperature)), 3) == expected
    for what, tree in DRAFTED.items():
        for slots in (1, 3) if what in ("eagle", "self-drafted") else (3,):
            method = method_of(**law(temperature), **tree)
            assert drawn(models[name], method, slots) == expected, (what, slots)


@pytest.mark.parametrize("name", ["anole", "lumina_mgpt"])
def test_self_drafting_accepts_what_repeats(models: dict[str, Model], name: str) -> None:
    """Where every code is the same, its neighbours are right drafts, row ends between them or not."""
    decoder = copy.deepcopy(models[name].decoder)
    decoder.head.weight.zero_()
    model = replace(models[name], decoder=decoder)
    requests = [Request("a", model.encode("sun"), 0)]
    method = method_of(**law(0.0), shape=TreeShape(9, 3, 20), drafter="self-draft")
    (image,) = build(model, method, 1, requests[0].prompt.length).decode(iter(requests))
    assert len(set(image.codes)) == 1 and image.target_calls < model.grid.size // 2


def test_prompts_of_lumina_mgpt(models: dict[str, Model]) -> None:
    model = models["lumina_mgpt"]
    words = tiny.vocabulary() | {name: len(tiny.vocabulary()) + n for n, name in enumerate(published.LUMINA)}
    prompt = model.encode("cat")
    opening = [words["<racm3:break>"], words["<reserved08802>"], words["<reserved08802>"]]
    text = "Generate an image of 8x8 according to the following prompt:\ncat"
    ids = [words[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in text]
    assert prompt.unconditional == opening
    assert prompt.conditional == [words["<s>"], *ids, words["<reserved08706>"], *opening]
    assert model.row_end == words["<reserved08799>"] and (model.grid.height, model.grid.width) == (4, 4)


def test_sizes_of_lumina_mgpt(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = f"--model lumina_mgpt --model_path {folders['lumina_mgpt'][0]} --model_type base --prompt cat"
    fixed += f" --num_images 1 --output_dir {tmp_path}"
    assert main.main(f"generate_images {fixed} --target_size 8 --cfg_mode sequential".split()) == 0
    capsys.readouterr()
    assert "multiple of 4" in refused(capsys, *f"{fixed}x --target_size 10".split())
    assert "<reserved08805>" in refused(capsys, *f"{fixed}x --target_size 20".split())


def test_what_is_missing_is_named(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders["anole"][0], target)
    home = folders["anole"][0].parent / "chameleon" / "tokenizer"
    fixed = f"--model anole --prompt cat --model_type base --output_dir {tmp_path}/out --model_path {target}"

    assert "vqgan.ckpt" in refused(capsys, *fixed.split())
    shutil.copy(home / "vqgan.ckpt", target)
    assert "vqgan.yaml" in refused(capsys, *fixed.split())
    (target / "vqgan.yaml").write_text("model: []")
    assert "does not describe a VQGAN" in refused(capsys, *fixed.split())
    base = f"{fixed} --tokenizer_base_path {folders['anole'][0].parent} --num_images 1"
    assert "tokenizer.json" in refused(capsys, *base.split())
    shutil.copytree(folders["anole"][0].parent / "chameleon", tmp_path / "base" / "chameleon")
    shutil.copy(
        target / "tokenizer.json", tmp_path / "base" / "chameleon" / "tokenizer" / "text_tokenizer.json"
    )
    base = f"{fixed} --tokenizer_base_path {tmp_path / 'base'} --num_images 1"
    assert main.main(f"generate_images {base}".split()) == 0


def test_the_other_family_is_refused(folders: dict[str, tuple[Path, Path]]) -> None:
    """Either would run as the other: the norms tell them apart."""
    for name, other in (("anole", "lumina_mgpt"), ("lumina_mgpt", "anole")):
        with pytest.raises(CheckpointError, match=f"no checkpoint of {name}, try --model {other}"):
            load(name, str(folders[other][0]), None, "fp32", "cpu", False)


def test_another_codebook_is_refused(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    home = folders["anole"][0].parent / "chameleon" / "tokenizer"
    shutil.copytree(folders["anole"][0].parent, tmp_path / "ckpts")
    path = tmp_path / "ckpts" / "chameleon" / "tokenizer" / "vqgan.ckpt"
    state = torch.load(home / "vqgan.ckpt", weights_only=True)
    state["state_dict"]["quantize.embedding.weight"] += 1
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="codebook"):
        load("anole", str(tmp_path / "ckpts" / "target"), None, "fp32", "cpu", False)
