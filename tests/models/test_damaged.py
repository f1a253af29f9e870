"""Damaged, missing and mismatched files, a case for every kind of fault. generate_images refuses each in one
line that names the fault, and check_ckpts names every fault without reading weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.inspection import inspect
from models.checkpoint.weights import Stored
from models.family import LoadOptions, home_of
from tests.conftest import Refused, Run
from tests.support.checkpoints import SIDE, Checkpoints, Tiny
from tests.support.published import edit, rewrite

Change = str | None | Callable[[Any], Any]  # another text, a removal, or a change of the content
PROCESSOR = "../processor"  # of GLM-Image
CUT, VQGAN, T5 = "cut", "../chameleon/tokenizer", "t5/flan-t5-xl"


def part(files: Tiny, name: str) -> Path:
    """Returns the path of a file beside the target, or of one of the drafter's for a name that starts with
    "drafter/". "weights" is the target's file or its last shard."""
    if name == "weights":
        return files.path if files.path.is_file() else max(files.path.glob("model*.safetensors"))
    folder, _, inner = name.partition("/")
    return files.drafter / inner if folder == "drafter" else home_of(files.path) / name


def damage(path: Path, change: Change) -> None:
    """Removes a file or folder, cuts off its end, replaces its text, or changes its JSON or its tensors."""
    if change is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif change == CUT:
        path.write_bytes(path.read_bytes()[:-200])
    elif isinstance(change, str):
        path.write_text(change)
    elif path.suffix == ".json":
        edit(path, change)
    elif path.suffix == ".npy":
        np.save(path, change(np.arange(64)[:, None].repeat(31, axis=1).astype(np.uint16)))
    elif path.suffix == ".safetensors":
        state = load_file(path)
        change(state)
        save_file(state, path, metadata={"format": "pt"})
    else:
        content = torch.load(path, weights_only=True)
        change(content.get("state_dict", content))
        torch.save(content, path)


def put(**values: object) -> Change:
    """Returns a change that sets values in a JSON file. A dict changes only those keys of a section."""

    def change(config: dict[str, Any]) -> None:
        for key, value in values.items():
            config[key] = config[key] | value if isinstance(value, dict) and key in config else value

    return change


def without(name: str) -> Change:
    """Returns a change that removes a tensor."""
    return lambda state: state.pop(name)


def swap(one: str, other: str, *names: str) -> Change:
    """Returns a change that exchanges two words of a vocabulary."""

    def change(config: dict[str, Any]) -> None:
        for name in names:
            config = config[name]
        config[one], config[other] = config[other], config[one]

    return change


def resize(shape: tuple[int, ...], *names: str) -> Change:
    """Returns a change that gives tensors another shape."""
    return lambda state: state.update({name: torch.zeros(shape) for name in names})


def without_prompts(state: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state if "cls_" in name]:
        del state[name]


# The checkpoint, the file, the change, and words that the line must contain.
CASES: list[tuple[str, str, Change, str]] = [
    ("llamagen file", "weights", None, ".pt"),
    ("lumina_mgpt", "weights", None, "model-00002-of-00002.safetensors"),
    ("anole", "weights", CUT, "model-00002-of-00002.safetensors"),
    ("llamagen file", "weights", CUT, ".pt"),
    ("anole", "config.json", "[1]", "config.json"),
    ("anole", "drafter/config.json", put(vocab_size=9), "drafter"),
    ("emoji", "drafter/model.safetensors", without("layers.0.input_layernorm.weight"), "input_layernorm"),
    ("anole", "top_63_indices.npy", lambda table: table[:32], "top_63_indices.npy"),
    ("anole", "config.json", put(intermediate_size=40), "mlp"),
    ("llamagen", "config.json", put(vocab_size=400), "[400, 32]"),
    ("anole", "config.json", put(rope_scaling={"type": "linear"}), "'linear'"),
    ("anole", "config.json", put(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "'yarn'"),
    ("anole", "config.json", put(head_dim=16), "q_proj"),
    ("anole", "config.json", put(hidden_act="gelu"), "hidden_act"),
    ("anole", "config.json", put(attention_bias=True), "attention_bias"),
    ("emoji", "config.json", swap("IMGIMGBAZ", "IMGIMGJZ", "vocabulary_map"), "vocabulary_map"),
    ("emoji", "text_tokenizer.json", swap("<racm3:break>", "<eoss>", "model", "vocab"), "<racm3:break>"),
    ("emoji", "text_tokenizer.json", put(model={"vocab": {"x": 9999}}), "9999"),
    ("anole", f"{VQGAN}/vqgan.ckpt", None, "vqgan.ckpt"),
    ("anole", f"{VQGAN}/vqgan.yaml", None, "vqgan.yaml"),
    ("anole", f"{VQGAN}/vqgan.yaml", "model: []", "vqgan.yaml"),
    ("anole", f"{VQGAN}/vqgan.ckpt", lambda state: state["quantize.embedding.weight"].add_(1), "vqgan.ckpt"),
    ("llamagen file", "weights", resize((40, 32), "layers.1.feed_forward.w3.weight"), "feed_forward.w3"),
    ("llamagen file", "weights", resize((67, 32), "tok_embeddings.weight", "output.weight"), "67 codes"),
    ("llamagen file", "config.json", None, "n_head"),
    ("llamagen classes", "config.json", '{"n_head": 4}', "--target_size"),
    ("llamagen", "config.json", put(cls_token_num=9), "cls_token_num"),
    ("llamagen", "vq_ds16_t2i.pt", None, "--vq_path"),
    ("llamagen", "t5", None, "--text_encoder"),
    ("llamagen", f"{T5}/config.json", put(d_model=40), "flan-t5-xl"),
    ("llamagen", f"{T5}/model.safetensors", without("encoder.final_layer_norm.weight"), "final_layer_norm"),
    ("llamagen", "drafter/config.json", put(input_type="t2i2"), "t2i2"),
    ("llamagen", "config.json", put(block_size=1024), "--model llamagen2"),
    ("llamagen", "config.json", put(block_size=18), "block_size"),
    ("llamagen", "weights", without_prompts, "model.cls_embedding."),
    ("janus_pro", "config.json", put(text_config={"num_hidden_layers": -1}), "num_hidden_layers"),
    ("emu3", "config.json", put(vq_config=[3]), "vq_config"),
    ("emu3", "tokenizer.json", "{", "tokenizer.json"),
    ("janus_pro", "weights", without("model.generation_head.vision_head.weight"), "vision_head.weight"),
    ("janus_pro", "chat_template.jinja", None, "chat_template.jinja"),
    ("janus_pro", "chat_template.jinja", "{% for %}", "chat template"),
    ("janus_pro", "generation_config.json", put(pad_token_id=10**6), "pad_token_id"),
    ("janus_pro", "config.json", put(vq_config={"projection_dim": 48}), "projection_dim"),
    ("emu3", "weights", without("vqmodel.decoder.conv_in.weight"), "decoder.conv_in.weight"),
    ("emu3", "config.json", lambda config: config["vocabulary_map"].pop("<|extra_200|>"), "<|extra_200|>"),
    ("emu3", "config.json", put(vocabulary_map={"<|extra_200|>": 5}), "<|extra_200|>"),
    ("glm_image", "weights", without("model.vqmodel.quantize.embedding.weight"), "quantize.embedding"),
    ("glm_image", "weights", resize((79, 64), "lm_head.weight"), "lm_head.weight"),
    ("glm_image", "config.json", put(image_start_token_id=3), "image_start_token_id"),
    ("glm_image", "config.json", put(image_end_token_id=80), "image_end_token_id"),
    ("glm_image", "config.json", put(text_config={"vision_vocab_size": 999}), "vision_vocab_size"),
    ("glm_image", "config.json", put(text_config={"rope_parameters": {"mrope_section": [1, 2]}}), "[1, 2]"),
    ("glm_image", "config.json", lambda config: config.pop("image_end_token_id"), "image_end_token_id"),
    ("glm_image", "generation_config.json", put(top_p=7), "top_p"),
    ("glm_image", f"{PROCESSOR}/tokenizer.json", None, "tokenizer.json"),
    ("glm_image", f"{PROCESSOR}/tokenizer_config.json", put(bos_token="<sop>"), "64"),
    ("glm_image", f"{PROCESSOR}/tokenizer_config.json", put(grid_eos_token=None), "grid_eos_token"),
    ("simplear", "config.json", put(use_sliding_window=True), "use_sliding_window"),
    ("simplear", "config.json", put(vocab_size=64_000), "vocab_size"),
    ("simplear", "config.json", put(vocab_size=64_200), "embed_tokens"),
    ("simplear", "weights", without("model.layers.1.self_attn.k_proj.bias"), "k_proj.bias"),
    ("simplear", "tokenizer.json", None, "<|t2i|>"),
    ("liquid", "config.json", put(hidden_act="silu"), "hidden_activation"),
    ("liquid", "config.json", put(head_dim=5), "head size 5"),
    ("liquid", "config.json", put(use_bidirectional_attention=True), "use_bidirectional_attention"),
]  # fmt: skip


def case_id(value: str | Change) -> str:
    """Returns a test's name. The workers of pytest-xdist must agree on it, so a function is named without its
    address."""
    return value[:40] if isinstance(value, str) else "damage"


@pytest.mark.parametrize(("name", "file", "change", "word"), CASES, ids=case_id)
def test_damaged_files(
    name: str, file: str, change: Change, word: str, checkpoints: Checkpoints, tmp_path: Path,
    refused: Refused,
) -> None:  # fmt: skip
    files = checkpoints[name].copied(tmp_path / "copy")
    damage(part(files, file), change)
    if word == "t2i2":  # the number of codes tells a target's stage, and tiny models have another number
        damage(files.path / "config.json", put(block_size=256))
    words = "--method eagle-2 --lantern --lantern_k 9 --prompt sun".split()
    words += ["--drafter_path", files.drafter, "--output_dir", tmp_path / "out"]
    line = refused("generate_images", *files.words(), *words)
    assert word in line and not (tmp_path / "out").exists()
    options = LoadOptions(str(files.path), str(files.drafter), target_size=SIDE.get(files.family))
    faults = [fault for checked in inspect(files.family, options) for fault in checked.faults]
    # check_ckpts does not read the weights of the text encoder, which are read for the first prompt.
    of_encoder = file.startswith(T5) and "model" in file
    assert of_encoder or word in " ".join(faults)


@pytest.mark.parametrize(
    ("name", "words", "word"),
    [
        ("janus_pro", "--prompt sun --model_path @emu3", "config.json"),
        ("glm_image", "--prompt sun --model_path @emu3", "config.json"),
        ("simplear", "--prompt sun --model_path @liquid", "config.json"),
        ("anole", "--prompt sun --model_path @lumina_mgpt", "--model lumina_mgpt"),
        ("lumina_mgpt", "--prompt sun --model_path @anole", "--model anole"),
        ("llamagen", "--class_labels 1,2", "--prompt"),
        ("llamagen", "--tokenizer_base_path x", "--tokenizer_base_path"),
        ("llamagen", "--target_size 16", "8 px"),
        ("llamagen classes", "--prompt sun", "--class_labels"),
        ("llamagen classes", "--class_labels 7", "0 to 6"),
        ("llamagen classes", "--class_labels 1,1", "--class_labels"),
        ("llamagen classes", "--class_labels 1;2", "--class_labels"),
        ("lumina_mgpt", "--prompt sun --target_size 10", "--target_size 10"),
        ("lumina_mgpt", "--prompt sun --target_size 20", "<reserved08805>"),
        ("emu3", "--prompt sun --ratio 0:3", "--ratio 0:3"),
        ("emu3", "--prompt sun --target_size 1 --ratio 9:1", "--target_size 1"),
        ("glm_image", "--prompt sun --target_size 64", "--height"),
        ("glm_image", "--prompt sun --ratio 1:1", "--ratio"),
        ("glm_image", "--prompt sun --cfg 2", "--cfg 2"),
        ("glm_image", "--prompt sun --record 1", "--record 1"),
        ("emoji", "--prompt sun --height 64", "--height 64"),
        ("emoji", "--prompt sun --target_size 512", "--target_size 512"),
        ("emoji", f"--prompt {2000 * 'word'} --method ar", "prompt"),
        ("emoji", "--prompt sun --drafter_path nowhere", "nowhere"),
        ("emoji", "--prompt sun --lantern --lantern_table nowhere", "--lantern_table nowhere"),
        ("emoji", "--prompt sun --revision main --model_path configs", "configs"),
        ("emoji", "--prompt sun --lantern --lantern_kk 3", "did you mean --lantern_k"),
        ("emoji", "--prompt sun --cuda_graphs --device cpu", "--cuda_graphs"),
        ("emoji", "--prompt sun --compile --device cpu", "--compile"),
        ("emoji", "--prompt sun --attention flash --device cpu --method ar", "--attention flash"),
    ],
    ids=case_id,
)
def test_options_that_do_not_fit(
    name: str, words: str, word: str, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    paths = [checkpoints[text[1:]].path if text[0] == "@" else text for text in words.split()]
    line = refused("generate_images", *checkpoints[name].words(), "--output_dir", tmp_path / "o", *paths)
    assert word in line and len(line) < 500 and not (tmp_path / "o").exists()


def test_check_ckpts_names_every_fault(
    run: Run, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints["emoji"].copied(tmp_path / "copy").path
    rewrite(folder, torch.float32, 3)
    monkeypatch.setattr(Stored, "read", None)  # it must not read any weights

    def check(*words: object) -> list[str]:
        status, out, _ = run("check_ckpts", "--model_path", folder, *words)
        document = json.loads(out.splitlines()[-1])
        faults = [fault for part in document["models"]["emoji"] for fault in part["faults"]]
        assert (document["ok"], document["faults"], status) == (not faults, len(faults), 2 if faults else 0)
        return faults

    assert check() == [] and len(check("--drafter_path", folder / "nowhere")) == 1
    assert check("--drafter_path", shutil.move(folder / "drafter", tmp_path / "away")) == []
    shutil.move(tmp_path / "away", folder / "drafter")
    edit(folder / "config.json", lambda config: config.update(intermediate_size=32))
    faults = check()
    assert len(faults) == 6 and all("mlp" in fault for fault in faults)  # three projections in two layers
    first, second, _ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    faults = check()
    assert [path.name in fault for path, fault in zip((first, second), faults, strict=True)] == [True, True]
