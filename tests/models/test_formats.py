"""Checkpoints as people have them: other fields, sizes, dtypes and shards, which file counts, prefixes, ties,
adapters, what training code stores beside the tensors, and Anole's commands."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ChameleonForConditionalGeneration

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.checkpoint.weights import read_weights
from models.llama_names import decoder_names, scatter
from tests.conftest import Refused, Run
from tests.models.test_refusals import damage, part, put
from tests.support import published, tiny, tiny_llamagen
from tests.support.checkpoints import Checkpoints, Tiny, load
from tests.support.golden import same_as_transformers
from tests.support.published import edit, rewrite, write_shards

State = dict[str, Tensor]
FIELDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no rope_theta": lambda config: config.pop("rope_theta"),
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
    assert model.prompts.cells.row_end == words["<reserved08799>"] and model.grid == Grid(4, 4, row_ends=True)


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


def renamed(change: Callable[[str], str]) -> Callable[[State], None]:
    """Returns a change of all names of a state dict."""

    def apply(state: State) -> None:
        tensors = {change(name): state.pop(name) for name in list(state)}
        state.update(tensors)

    return apply


def codes(files: Tiny) -> State:
    """Returns the weights of the loaded target and drafter."""
    model = files.load()
    assert model.drafter_net is not None
    return {**model.decoder.state_dict(), **{f"d.{n}": t for n, t in model.drafter_net.state_dict().items()}}


@pytest.mark.parametrize("old", ["index", "bin", "both"])
def test_a_whole_file_counts_before_older_ones(tmp_path: Path, old: str) -> None:
    """The order is that of transformers: model.safetensors, its index, pytorch_model.bin, its index."""
    ones, zeros = {"w": torch.ones(3), "v": torch.ones(2)}, {"w": torch.zeros(3), "v": torch.zeros(2)}
    if old != "bin":
        write_shards(zeros, tmp_path, 2)
    if old != "index":
        torch.save({"w": torch.full((3,), 2.0)}, tmp_path / "pytorch_model.bin")
    save_file(ones, tmp_path / "model.safetensors")
    assert torch.equal(read_weights(tmp_path)["w"], ones["w"])
    (tmp_path / "model.safetensors").unlink()
    assert read_weights(tmp_path)["w"][0] == (2 if old == "bin" else 0)


PREFIXES = {
    "DDP compiled": lambda name: f"module._orig_mod.{name}",
    "FSDP": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "merged adapter": lambda name: f"base_model.model.{name}",
}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [*(("emoji", prefix) for prefix in PREFIXES), ("llamagen file", "DDP compiled"), ("anole", "FSDP")],
)
def test_names_of_wrapped_models(checkpoints: Checkpoints, tmp_path: Path, name: str, prefix: str) -> None:
    """The target is a .safetensors, a .pt or shards with an index; the drafter is wrapped too."""
    files, change = checkpoints[name].copied(tmp_path / "copy"), renamed(PREFIXES[prefix])
    paths = [files.path] if files.path.is_file() else list(files.path.glob("*.safetensors"))
    for path in (*paths, *files.drafter.glob("*.safetensors"), *files.drafter.glob("*.bin")):
        damage(path, change)
    if name == "anole":
        index = files.path / "model.safetensors.index.json"
        where = json.loads(index.read_text())["weight_map"]
        renamed(PREFIXES[prefix])(where)
        index.write_text(json.dumps({"weight_map": where}))
    expected = codes(checkpoints[name])
    assert all(torch.equal(tensor, expected[key]) for key, tensor in codes(files).items())


@pytest.mark.parametrize(
    ("name", "inner"), [("emoji", False), ("llamagen file", False), ("emu3", False), ("emu3", True)]
)
def test_tied_heads(checkpoints: Checkpoints, tmp_path: Path, name: str, inner: bool) -> None:
    """A file without a head is read if config.json, or the part of its text model, ties it to the embeddings.
    The heads of Janus-Pro and GLM-Image score the codes alone and cannot be tied."""
    files = checkpoints[name].copied(tmp_path / "copy")
    heads = ("lm_head.weight", "output.weight", "text_model.lm_head.weight")
    damage(part(files, "weights"), lambda state: [state.pop(head, None) for head in heads])
    damage(part(files, "config.json"), put(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"(lm_head|output)\.weight"):
        files.load()
    tied: Any = {"tie_word_embeddings": True}
    damage(part(files, "config.json"), put(**({"text_config": tied} if inner else tied)))
    model = files.load()
    rows = model.decoder.embed.weight[model.first_code : model.first_code + model.num_codes]
    assert torch.equal(model.decoder.head.weight, rows)


def test_adapters(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """An adapter may stand alone in a folder, or beside the weights that it changes."""
    files = checkpoints["emoji"].copied(tmp_path / "copy")
    layer = "model.layers.0.self_attn.q_proj."
    added = {f"{layer}lora_A.default.weight": torch.ones(2, 32)}
    damage(part(files, "weights"), lambda state: state.update(added))
    with pytest.raises(CheckpointError, match=r"LoRA.*merge"):
        files.load()
    damage(part(files, "weights"), renamed(lambda name: name.replace(layer, f"{layer}base_layer.")))
    with pytest.raises(CheckpointError, match="LoRA"):
        files.load()
    shutil.move(files.path / "config.json", files.path / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"LoRA.*merge"):
        files.load()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_stores_beside_the_tensors(
    checkpoints: Checkpoints, tmp_path: Path, zipped: bool
) -> None:
    files = checkpoints["llamagen file"].copied(tmp_path / "copy")
    state = torch.load(files.path, weights_only=True)
    content = {
        "model": state.get("model", state),
        "args": Namespace(lr=1e-4, results="runs"),
        "steps": 9,
    }
    torch.save(content, files.path, _use_new_zipfile_serialization=zipped)
    expected = codes(checkpoints["llamagen file"])
    assert all(torch.equal(tensor, expected[key]) for key, tensor in codes(files).items())
