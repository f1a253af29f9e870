"""One reader for the folders that people have: which file counts, prefixes, ties, quantisation, adapters, and
what training code stores beside the tensors."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adt_tree.errors import CheckpointError
from cli.inspection import inspect
from models.checkpoint.weights import read_weights
from models.family import LoadOptions
from tests.models.test_damaged import damage, part, put
from tests.support.checkpoints import SIDE, Checkpoints, Tiny
from tests.support.published import write_shards

State = dict[str, Tensor]


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
    "DDP": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
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


QUANTISED = {
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "quantization": {"quantization": {"group_size": 64, "bits": 4}},
}


@pytest.mark.parametrize(
    ("name", "file", "word"),
    [
        *(("emoji", "config.json", word) for word in QUANTISED), ("emoji", "drafter/config.json", "fp8"),
        ("llamagen", "t5/flan-t5-xl/config.json", "bitsandbytes"),
    ],
)  # fmt: skip
def test_quantised_folders(checkpoints: Checkpoints, tmp_path: Path, name: str, file: str, word: str) -> None:
    files = checkpoints[name].copied(tmp_path / "copy")
    damage(part(files, file), put(**QUANTISED[word]))
    with pytest.raises(CheckpointError, match=f"quantised by {word}: not supported") as caught:
        files.load()
    assert "\n" not in str(caught.value) and "fetch" not in str(caught.value)
    options = LoadOptions(str(files.path), str(files.drafter), target_size=SIDE.get(files.family))
    assert any("quantised" in fault for part in inspect(files.family, options) for fault in part.faults)


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
        "args": Namespace(lr=1e-4, results=Path("runs"), best=np.float64(0.5), seen=np.int64(7)),
        "config": SimpleNamespace(depth=2),
        "steps": 9,
    }
    torch.save(content, files.path, _use_new_zipfile_serialization=zipped)
    expected = codes(checkpoints["llamagen file"])
    assert all(torch.equal(tensor, expected[key]) for key, tensor in codes(files).items())
