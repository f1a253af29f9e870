"""Malicious files: none of them runs code, leads out of its folder, hangs, or allocates terabytes. Each is
refused in one line that names it."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adt_tree.errors import CheckpointError
from cli.inspection import inspect
from models.checkpoint.weights import read_weights
from models.family import LoadOptions
from models.loading import load
from tests.support.checkpoints import Checkpoints
from tests.support.refusal import refusal

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


NAN, INFINITE = float("nan"), float("inf")
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "emoji": {
        # Fewer layers than there are tensors for are no fault of the tensors.
        "num_hidden_layers": (-1, 0, 1.5, True, "many", [8], {}, 10**9, 10**30),
        "hidden_size": (-1, "many", 10**9),
        **dict.fromkeys(("num_attention_heads", "vocab_size", "intermediate_size"), (10**9,)),
        **dict.fromkeys(("vq_config.num_embeddings", "vq_config.resolution"), (-1, 10**9)),
        "num_key_value_heads": (3, 10**9), "max_position_embeddings": (0, 10**12),
        "rms_norm_eps": (NAN, -1e-5, "x"), "rope_theta": (NAN, INFINITE, -1, 0, "x", [1]),
        "rope_parameters": ("x", [1]), "vq_config": (None, [], "x", 7),
        "vocabulary_map": ([1], "x", {"<s>": "one"}, {"<s>": -1}, {"<s>": 1.5}),
        "vq_config.channel_multiplier": (0, [], [0], ["x"], [1] * 99), "vq_config.attn_resolutions": ("x", 3),
        "vq_config.base_channels": (0, 10**9, "x"), "vq_config.num_res_blocks": (-1, 10**6, "x"),
    },
    "llamagen": {
        "block_size": (10**12, "many", -4), "cls_token_num": (10**12, "x"), "rope_base": (NAN,),
    },
}  # fmt: skip
CASES = [
    (family, name, value)
    for family, fields in FIELDS.items()
    for name, wrong_values in fields.items()
    for value in wrong_values
]


@pytest.fixture(scope="module")
def copies(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns checkpoints whose config.json each test replaces."""
    root = tmp_path_factory.mktemp("hostile")
    return {family: checkpoints[family].copied(root / family).path for family in FIELDS}


def not_loaded(folder: Path, family: str) -> str:
    """Returns the line with which loading refuses, and checks that check_ckpts prints it too."""
    options = LoadOptions(str(folder), precision="fp32", device="cpu")
    line = refusal(lambda: load(family, options), CheckpointError)
    assert line.startswith(inspect(family, LoadOptions(str(folder)))[0].faults[0].split(" (and")[0])
    return line


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("family", "field", "value"), CASES, ids=lambda case: str(case)[:30])
def test_sizes_that_cannot_be(
    checkpoints: Checkpoints, copies: dict[str, Path], family: str, field: str, value: object
) -> None:
    config = json.loads((checkpoints[family].path / "config.json").read_text())
    *outer, name = field.split(".")
    (config[outer[0]] if outer else config)[name] = value
    (copies[family] / "config.json").write_text(json.dumps(config))
    line = not_loaded(copies[family], family)
    assert "config.json" in line and (name in line or "head" in line), line
    assert not any(word in line for word in ("NoneType", "unsupported", "attribute", "argument")), line


def test_deep_nesting(copies: dict[str, Path]) -> None:
    (copies["emoji"] / "config.json").write_text("[" * 100_000)
    assert "config.json" in not_loaded(copies["emoji"], "emoji")
