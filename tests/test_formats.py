"""Checkpoints of the published formats with other fields, sizes, types, shards: files say all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.sampling import Sampling
from models.layouts.llama import decoder_names, scatter
from tests import tiny, tiny_llamagen
from tests.checkpoints import load
from tests.golden import same_as_transformers
from tests.methods import check_exact
from tests.published import edit, rewrite

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
EXACT = ("eagle-2", "self-draft")


def check(folder: Path) -> None:
    """Against transformers, along random tokens; and what is exported is what was read."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.ChameleonForConditionalGeneration
    theirs = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 60, (2, 19), generator=torch.Generator().manual_seed(5))
    ours, state = load("anole", folder, need_drafter=False).decoder, theirs.state_dict()
    same_as_transformers(ours, theirs, ids)
    for name, tensor in scatter(ours.state_dict(), decoder_names(ours.config), ours.config).items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("how", FIELDS)
def test_fields_of_either_style(tmp_path: Path, how: str) -> None:
    folder = tiny.build(tmp_path / "x")
    edit(folder / "config.json", FIELDS[how])
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
    """The target is transformers' own, and its drafter leaves the image as it was."""
    folder = tiny.build(tmp_path / "x", **sizes)
    file = folder / "model.safetensors"
    state = {name: t + ("norm" in name) * 0.3 * torch.randn_like(t) for name, t in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    rewrite(folder, dtype, shards, leave)
    check(folder)
    model = load("anole", folder)
    check_exact(model, ["sun", "cat"], Sampling(temperature=4.0), EXACT)  # a tied head repeats one code at 1


@pytest.mark.parametrize("leave", ["", "lm_head.weight"])
def test_llamagen_in_shards_of_bf16(tmp_path: Path, leave: str) -> None:
    """The folder's form as transformers shards it, its head tied or not, some fields left out."""
    whole = load("llamagen", tiny_llamagen.build(tmp_path / "whole", 4, num_key_value_heads=2))
    folder = tiny_llamagen.build(tmp_path / "shards", 4, num_key_value_heads=2)
    rewrite(folder, torch.bfloat16, 3, leave)

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = bool(leave)
        for name in ("rms_norm_eps", "rope_base", "architectures"):
            del config[name]

    edit(folder / "config.json", change)
    model = load("llamagen", folder)
    got, expected = model.decoder.state_dict(), dict(whole.decoder.state_dict())
    if leave:
        expected["head.weight"] = expected["embed.weight"]
    assert all(torch.equal(got[name], expected[name].bfloat16().float()) for name in expected)
    assert model.decoder.config.norm_eps == 1e-6 and model.decoder.config.rope_theta == 10000
    check_exact(model, ["sun", "cat"], Sampling(), EXACT)
