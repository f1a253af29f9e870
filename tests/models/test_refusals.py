"""Damaged, missing, mismatched and malicious files of checkpoints, a case for every kind of fault.

generate_images refuses each in one line that names the fault, and check_ckpts names every fault without
reading weights. No file runs code, leads out of its folder, hangs, or allocates terabytes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.errors import CheckpointError
from cli.inspection import inspect
from models.checkpoint.weights import Stored, read_weights
from models.codecs.vq import VQConfig
from models.decoder.config import read_shape
from models.family import LoadOptions, home_of
from tests.conftest import Refused, Run
from tests.support.checkpoints import SIDE, Checkpoints, Tiny
from tests.support.published import edit, rewrite
from tests.support.refusal import refusal

Change = str | None | Callable[[Any], Any]  # another text, a removal, or a change of the content
PROCESSOR = "../processor"  # of GLM-Image
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
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
            section = config.get(key)
            config[key] = section | value if isinstance(section, dict) and isinstance(value, dict) else value

    return change


def without(name: str) -> Change:
    """Returns a change that removes a tensor."""
    return lambda state: state.pop(name)


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
    ("llamagen", "config.json", put(vocab_size=400), "400 codes"),
    ("anole", "config.json", put(rope_scaling={"type": "linear"}), "'linear'"),
    ("anole", "config.json", put(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "'yarn'"),
    ("anole", "config.json", put(head_dim=16), "not fit"),
    ("anole", "config.json", put(hidden_act="gelu"), "hidden_act"),
    ("anole", "config.json", put(attention_bias=True), "attention_bias"),
    ("anole", f"{VQGAN}/vqgan.ckpt", None, "vqgan.ckpt"),
    ("anole", f"{VQGAN}/vqgan.yaml", "model: []", "vqgan.yaml"),
    ("llamagen file", "weights", resize((40, 32), "layers.1.feed_forward.w3.weight"), "blocks.1.mlp.gate_up"),
    ("llamagen file", "weights", resize((67, 32), "tok_embeddings.weight", "output.weight"), "67 codes"),
    ("llamagen file", "config.json", None, "n_head"),
    ("llamagen classes", "config.json", '{"n_head": 4}', "target_size"),
    ("llamagen", "config.json", put(cls_token_num=9), "uncond_embedding"),
    ("llamagen", "vq_ds16_t2i.pt", None, "vq_path"),
    ("llamagen", "t5", None, "text_encoder"),
    ("llamagen", f"{T5}/config.json", put(d_model=40), "flan-t5-xl"),
    ("llamagen", f"{T5}/model.safetensors", without("encoder.final_layer_norm.weight"), "final_layer_norm"),
    ("llamagen", "drafter/config.json", put(input_type="t2i2"), "t2i2"),
    ("llamagen", "weights", without_prompts, "model.cls_embedding."),
    ("janus_pro", "config.json", put(text_config={"num_hidden_layers": -1}), "num_hidden_layers"),
    ("emu3", "tokenizer.json", "{", "tokenizer.json"),
    ("janus_pro", "weights", without("model.generation_head.vision_head.weight"), "vision_head.weight"),
    ("janus_pro", "chat_template.jinja", None, "chat_template.jinja"),
    ("janus_pro", "chat_template.jinja", "{% for %}", "chat template"),
    ("janus_pro", "config.json", put(vq_config={"projection_dim": 48}), "head.proj_out"),
    ("emu3", "weights", without("vqmodel.decoder.conv_in.weight"), "decoder.conv_in.weight"),
    ("emu3", "config.json", lambda config: config["vocabulary_map"].pop("<|extra_200|>"), "<|extra_200|>"),
    ("glm_image", "weights", without("model.vqmodel.quantize.embedding.weight"), "quantize.embedding"),
    ("glm_image", "weights", resize((79, 64), "lm_head.weight"), "head.weight"),
    ("glm_image", "config.json", put(text_config={"vision_vocab_size": 999}), "head.weight"),
    ("glm_image", "config.json", lambda config: config.pop("image_end_token_id"), "image_end_token_id"),
    ("glm_image", f"{PROCESSOR}/tokenizer.json", None, "tokenizer.json"),
    ("glm_image", f"{PROCESSOR}/tokenizer_config.json", put(grid_eos_token=None), "grid_eos_token"),
    ("simplear", "config.json", put(use_sliding_window=True), "use_sliding_window"),
    ("simplear", "config.json", put(vocab_size=64_200), "64200"),
    ("simplear", "weights", without("model.layers.1.self_attn.k_proj.bias"), "k_proj.bias"),
    ("simplear", "tokenizer.json", None, "<|t2i|>"),
    ("liquid", "config.json", put(hidden_act="silu"), "hidden_activation"),
    ("liquid", "config.json", put(head_dim=5), "head_dim"),
    *((name, file, put(**section), f"quantised by {word}: not supported")
      for name, file, section, word in (
        ("emoji", "config.json", {"quantization_config": BITSANDBYTES}, "bitsandbytes"),
        ("emoji", "config.json", {"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        ("emoji", "drafter/config.json", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("llamagen", f"{T5}/config.json", {"quantization_config": BITSANDBYTES}, "bitsandbytes"),
    )),
    ("emoji", "config.json", "[" * 100_000, "config.json"),
]  # fmt: skip

COUNT = (-1, 0, 1.5, True, "many", [8], {})
# Values of fields of config.json that cannot be, and of its vq_config.
SIZES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), COUNT),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings"), COUNT),
}
VQ_SIZES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_embeddings", "resolution", "base_channels", "num_res_blocks"), COUNT),
    "channel_multiplier": ([0], ["x"]),
}


@pytest.mark.parametrize("field", [*SIZES, *VQ_SIZES])
def test_values_that_cannot_be_sizes(checkpoints: Checkpoints, field: str) -> None:
    config = json.loads((checkpoints["emoji"].path / "config.json").read_text())
    read, fields = (read_shape, config) if field in SIZES else (VQConfig.from_hf, config["vq_config"])
    read(fields)  # control
    for value in (SIZES | VQ_SIZES)[field]:
        line = refusal(lambda value=value: read(fields | {field: value}), ValueError)
        assert field in line, value


def case_id(value: str | Change) -> str:
    """Returns a test's name. The workers of pytest-xdist must agree on it, so a function is named without its
    address."""
    return value[:40] if isinstance(value, str) else "damage"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "file", "change", "word"), CASES, ids=case_id)
def test_damaged_files(
    name: str, file: str, change: Change, word: str, checkpoints: Checkpoints, tmp_path: Path,
    refused: Refused,
) -> None:  # fmt: skip
    files = checkpoints[name].copied(tmp_path / "copy")
    damage(part(files, file), change)
    if word == "t2i2":  # the number of codes tells a target's stage, and tiny models have another number
        damage(files.path / "config.json", put(block_size=256))
    options = "--method eagle-2 --lantern --lantern_k 9 --prompt sun".split()
    options += ["--drafter_path", files.drafter, "--output_dir", tmp_path / "out"]
    line = refused("generate_images", *files.words(), *options)
    assert word in line and not (tmp_path / "out").exists()
    assert not any(
        unclear in line for unclear in ("NoneType", "unsupported", "has no attribute", "argument")
    ), line
    checked = inspect(
        files.family, LoadOptions(str(files.path), str(files.drafter), target_size=SIDE.get(files.family))
    )
    faults = " ".join(fault for part in checked for fault in part.faults)
    # check_ckpts does not read the weights of the text encoder, which are read for the first prompt.
    of_encoder = file.startswith(T5) and "model" in file
    assert of_encoder or word in faults


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
    assert len(faults) == 4 and all("mlp" in fault for fault in faults)  # two matrices in two layers
    first, second, _ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    faults = check()
    assert [path.name in fault for path, fault in zip((first, second), faults, strict=True)] == [True, True]


MARK = Path("executed")


class Command:
    """An object that leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARK}",)


def saved(content: object, zipped: bool = True) -> bytes:
    """Returns the bytes that torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


CONTENTS = {
    "page": b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n",
    "text": b"hello world this is text\n",
    "json": b'{"a": 1}',
    "zeros": bytes(500),
    "empty": b"",
    "truncated": saved({"w": torch.ones(99)})[:200],
    "list": saved([1]),
    "code": saved({"w": torch.ones(2), "x": Command()}),
    "old code": saved({"w": torch.ones(2), "x": Command()}, zipped=False),
    "plain code": pickle.dumps({"x": Command()}, protocol=4),  # torch warns about this protocol
    "archive": b"PK\5\6" + bytes(18),
    "tape": tarfile.TarInfo("a").tobuf() + bytes(1024),
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_contents_that_are_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(CONTENTS[kind])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        line = refusal(lambda: read_weights(tmp_path), CheckpointError)
    assert name in line and "weights_only" not in line and not warned and not MARK.exists()
    assert {"page": "web page", "pointer": "git-lfs"}.get(kind, "") in line


OUTSIDE = ["../../../../../etc/passwd", "/etc/passwd", "a/../../b.safetensors", "..", "..\\x.safetensors", 5]


@pytest.mark.parametrize("content", [{"weight_map": {"w": shard}} for shard in OUTSIDE] + ["{", "{}", "[]"])
def test_shards_outside_the_folder_are_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    """The index may also be damaged."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content if isinstance(content, str) else json.dumps(content))
    opened: list[Path] = []
    monkeypatch.setattr("models.checkpoint.weights._open", opened.append)
    assert index.name in refusal(lambda: read_weights(tmp_path), CheckpointError) and not opened


def test_shards_in_a_folder_below_are_opened(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "parts" / "..one.safetensors")
    index = {"weight_map": {"w": "parts/..one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(tmp_path)["w"].tolist() == [1, 1]
