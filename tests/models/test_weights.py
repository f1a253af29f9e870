"""Weights are read when they are needed, once, into the memory where they stay. A damaged file gives one line
that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.errors import CheckpointError
from models.checkpoint import weights as module
from models.checkpoint.stored_module import load_module
from models.checkpoint.weights import read_weights
from models.registry import EMOJI
from tests.support import tiny
from tests.support.published import write_shards
from tests.support.runs import python


def tensors() -> dict[str, torch.Tensor]:
    """Returns some tensors of several dtypes."""
    torch.manual_seed(0)
    return {"a.w": torch.randn(4, 3), "a.b": torch.randn(5).bfloat16(), "n": torch.arange(7)}


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "model", "module", "state_dict", "legacy"])
def test_every_published_form(tmp_path: Path, form: str) -> None:
    state, path = tensors(), tmp_path
    if form == "safetensors":
        save_file(state, tmp_path / "model.safetensors")
    elif form == "shards":
        write_shards(state, tmp_path, 2)
    elif form == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        path = tmp_path / "x.pt"
        content = state if form == "legacy" else {form: state, "steps": 3}
        torch.save(content, path, _use_new_zipfile_serialization=form != "legacy")
    weights = read_weights(path)
    assert set(weights) == set(state) and weights.shapes["a.w"] == (4, 3)
    for name, tensor in state.items():
        assert torch.equal(weights[name], tensor) and weights[name].dtype == tensor.dtype
    placed = weights.placed(torch.device("cpu"), torch.float64).below("a.")
    assert set(placed) == {"w", "b"} and placed["b"].dtype == torch.float64
    assert weights.placed(torch.device("cpu"), torch.float16)["n"].dtype == torch.int64
    with pytest.raises(KeyError, match="absent"):
        weights["absent"]
    half = weights.placed(torch.device("cpu"), torch.float16).stacked(["a.w", "a.w"])
    assert torch.equal(half, torch.cat((state["a.w"], state["a.w"])).half())


def test_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_weights(EMOJI.target_folder).digest() == "0113db3fa87ac829"
    torch.manual_seed(0)
    state = {"w": torch.randn(64, 256), "v": torch.randn(3)}
    save_file(state, tmp_path / "model.safetensors")
    whole = read_weights(tmp_path).digest()
    monkeypatch.setattr(module, "WHOLE_DIGEST", 100)
    sampled = read_weights(tmp_path).digest()
    state["w"][-1, -1] += 1
    save_file(state, tmp_path / "model.safetensors")
    assert len({whole, sampled, read_weights(tmp_path).digest()}) == 3


def test_a_shard_in_the_place_of_another(tmp_path: Path) -> None:
    write_shards(tensors(), tmp_path, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=second.name) as caught:
        read_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_out_of_memory_is_told_apart(tmp_path: Path) -> None:
    def full(weights: module.Weights) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(CheckpointError, match="device"):
        load_module(lambda: torch.nn.Linear(1, 1), module.Weights({}), tmp_path, full)


PEAK = """
import sys
from pathlib import Path
from tests.support.checkpoints import load
from tests.models.test_memory import status
load("emoji", sys.argv[1], precision="bf16")
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
model = load("emoji", sys.argv[2], need_drafter=False, precision="bf16")
print(status("VmHWM:") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counters")
def test_loading_takes_little_more_memory_than_the_file(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tiny.build(tmp_path / "large", hidden_size=1024, intermediate_size=2816, num_hidden_layers=3)
    state = {name: tensor.bfloat16() for name, tensor in load_file(large / "model.safetensors").items()}
    (large / "model.safetensors").unlink()
    write_shards(state, large, 3)
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    # Makes freed memory return to the system at once, as that of large tensors does. Otherwise the test would
    # measure holes in the heap.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    done = python("-c", PEAK, tiny_checkpoint, large)
    assert done.returncode == 0, done.stderr
    assert size > 70e6 and int(done.stdout) < 1.2 * size, (int(done.stdout), size)
