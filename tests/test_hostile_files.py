"""Hostile files and configurations: none runs code, hangs or leads out of its folder; each is one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adt_tree.errors import CheckpointError
from models.checkpoint.weights import read_weights
from models.inspection import inspect
from models.loading import load
from models.spec import LoadOptions
from tests.checkpoints import Checkpoints

MARK = Path("executed")


class Command:
    """Unpickling it would leave a mark."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARK}",)


def saved(content: object, zipped: bool = True) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


CODE = saved({"w": torch.ones(2), "x": Command()})
PAGE, POINTER = "is a web page, not weights", "is a pointer of git-lfs"
FOREIGN, DAMAGED, CODED = "is no file of torch.save", "truncated or damaged", "no code is run from it"
CONTENTS = {
    "page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", PAGE),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n", POINTER),
    "text": (b"hello world this is text\n", FOREIGN),
    "words": (b'{"a": 1}', FOREIGN),
    "nothing": (bytes(500), FOREIGN),
    "empty": (b"", DAMAGED),
    "truncated": (saved({"w": torch.ones(99)})[:200], DAMAGED),
    "listed": (saved([1]), "holds a list, not a table"),
    "code": (CODE, f"{CODED}: save its tensors alone"),
    "old code": (saved({"w": torch.ones(2), "x": Command()}, zipped=False), CODED),
    "plain code": (pickle.dumps({"x": Command()}, protocol=4), FOREIGN),  # torch warns of this protocol
    "archive": (b"PK\5\6" + bytes(18), "cannot be read"),
    "tape": (tarfile.TarInfo("a").tobuf() + bytes(1024), FOREIGN),
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_what_is_saved_in_the_place_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content, says = CONTENTS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(CheckpointError) as caught:
        warnings.simplefilter("always")
        read_weights(tmp_path)
    line = str(caught.value)
    same = name.endswith("bin") or says in (PAGE, POINTER)
    assert line.startswith(f"{path} ") and (says if same else "cannot be read") in line
    assert "weights_only" not in line and "\n" not in line and not warned and not MARK.exists()


@pytest.mark.parametrize(
    "shard",
    ["../../../../../etc/passwd", "/etc/passwd", "a/../../b.safetensors", "..", "..\\secret.safetensors", 5],
)
def test_shards_outside_the_folder_are_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: object
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    opened: list[Path] = []
    monkeypatch.setattr("models.checkpoint.weights._open", opened.append)
    with pytest.raises(CheckpointError, match="outside its folder|is not an index of shards") as caught:
        read_weights(tmp_path)
    assert index.name in str(caught.value) and "\n" not in str(caught.value) and not opened


def test_shards_in_a_folder_below_are(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "parts" / "..one.safetensors")
    index = {"weight_map": {"w": "parts/..one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(tmp_path)["w"].tolist() == [1, 1]


NOT_A_SIZE = (-1, 0, 1.5, True, "many", [8], {}, 10**9, 10**30)
NAN = float("nan")
FIELDS = {
    "hidden_size": NOT_A_SIZE, "num_hidden_layers": NOT_A_SIZE, "num_attention_heads": NOT_A_SIZE,
    "num_key_value_heads": (-1, 3, "two", 10**9), "intermediate_size": NOT_A_SIZE, "vocab_size": NOT_A_SIZE,
    "max_position_embeddings": (-1, 0, "many", 10**12), "rms_norm_eps": (NAN, -1e-5, "x"),
    "rope_theta": (NAN, float("inf"), -1, 0, "x", [1]), "rope_parameters": ("x", [1]),
    "vocabulary_map": ([1], "x", {"<s>": "one"}, {"<s>": -1}, {"<s>": 1.5}),
    "vq_config": (None, [], "x", 7), "vq_config.resolution": (*NOT_A_SIZE, 10_000_000, 7),
    "vq_config.channel_multiplier": (0, [], [0], ["x"], [1] * 99), "vq_config.base_channels": (0, 10**9, "x"),
    "vq_config.num_res_blocks": (-1, 10**6, "x"), "vq_config.num_embeddings": NOT_A_SIZE,
    "vq_config.attn_resolutions": ("x", [0], 3),
}  # fmt: skip
LLAMAGENS = {"block_size": (10**12, "many", -4), "cls_token_num": (10**12, "x"), "rope_base": (NAN,),
             "hidden_size": ("many",)}  # fmt: skip
CLUMSY = ("object", "NoneType", "unsupported", "attribute", "argument")
CASES = [("emoji", name, value) for name, values in FIELDS.items() for value in values]
CASES += [("llamagen", name, value) for name, values in LLAMAGENS.items() for value in values]


def refused(folder: Path, family: str) -> str:
    """The one line of loading, which check_ckpts has as well."""
    with pytest.raises(CheckpointError) as caught:
        load(family, LoadOptions(str(folder), precision="fp32", device="cpu"))
    faults = inspect(family, LoadOptions(str(folder)))[0].faults
    assert faults and "\n" not in str(caught.value) and caught.value.faults == faults
    return str(caught.value)


@pytest.fixture(scope="module")
def copies(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints, whose config.json each test writes anew."""
    root = tmp_path_factory.mktemp("hostile")
    return {family: checkpoints[family].copied(root / family).path for family in ("emoji", "llamagen")}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("family", "name", "value"), CASES, ids=lambda case: str(case)[:30])
def test_sizes_that_cannot_be(
    checkpoints: Checkpoints, copies: dict[str, Path], family: str, name: str, value: object
) -> None:
    config = json.loads((checkpoints[family].path / "config.json").read_text())
    *outer, field = name.split(".")
    (config[outer[0]] if outer else config)[field] = value
    (copies[family] / "config.json").write_text(json.dumps(config))
    line = refused(copies[family], family)
    assert "config.json" in line and (field in line or "head" in line), line
    assert not any(word in line for word in CLUMSY), line


def test_deep_nesting(copies: dict[str, Path]) -> None:
    (copies["emoji"] / "config.json").write_text("[" * 100_000)
    assert "is not JSON" in refused(copies["emoji"], "emoji")
