"""Tiny checkpoints in the published layouts: sharded weights without a VQ decoder, Meta's VQGAN beside them,
and a pickled drafter. Lumina-mGPT's has its tokens and norms as well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import tiny

SIZES = range(1, 5)  # the sides, in pairs of cells, for which the vocabulary has a token
LUMINA = ["<reserved08799>", *(f"<reserved{8800 + n:05d}>" for n in SIZES)]


def write_shards(state: dict[str, Tensor], folder: Path, count: int) -> None:
    """Writes weights into `count` shards and an index of them."""
    where: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: state[key].contiguous() for key in list(state)[number::count]}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_vqgan(state: dict[str, Tensor], folder: Path) -> None:
    """Writes vqgan.ckpt and vqgan.yaml."""
    fields = tiny.VQ
    shape = {
        "double_z": False, "z_channels": fields["latent_channels"], "resolution": fields["resolution"],
        "in_channels": 3, "out_ch": 3, "ch": fields["base_channels"],
        "ch_mult": fields["channel_multiplier"], "num_res_blocks": fields["num_res_blocks"],
        "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    params = {"embed_dim": fields["embed_dim"], "n_embed": fields["num_embeddings"], "ddconfig": shape}
    folder.mkdir(parents=True)
    (folder / "vqgan.yaml").write_text(json.dumps({"model": {"params": params}}))  # JSON is YAML
    torch.save({"state_dict": {**state, "loss.logvar": torch.zeros(1)}}, folder / "vqgan.ckpt")


def _longer(config: dict[str, Any]) -> None:
    """Appends LUMINA to the vocabulary."""
    size = config["vocab_size"]
    config["vocab_size"] = size + len(LUMINA)
    config["vocabulary_map"] |= {name: size + n for n, name in enumerate(LUMINA)}


def _widen(state: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Adds rows to the token tables and keeps one norm of queries and keys for all heads, as Lumina-mGPT
    does."""
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "embed_tokens.weight"):
        if name in state:
            more = torch.randn(rows, state[name].shape[1], generator=generator)
            state[name] = torch.cat((state[name], more))
    return {name: t[:1] + 0.1 if "_norm." in name else t for name, t in state.items()}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a JSON file in place."""
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite(folder: Path, dtype: torch.dtype, shards: int, leave: str = "") -> None:
    """Writes the weights again in another dtype and number of shards. leave: the name of a tensor to leave
    out."""
    state = {n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items() if n != leave}
    (folder / "model.safetensors").unlink()
    write_shards(state, folder, shards)


def build(root: Path, lumina: bool) -> tuple[Path, Path]:
    """Writes a checkpoint and the files beside it. Returns the folders of target and drafter."""
    source = tiny.build(root / "source")
    target, drafter = root / "ckpts" / "target", root / "ckpts" / "trained_drafters" / "drafter"
    target.mkdir(parents=True)
    drafter.mkdir(parents=True)
    state, drafter_state = (
        load_file(source / "model.safetensors"),
        load_file(source / "drafter" / "model.safetensors"),
    )
    prefix = "model.vqmodel."
    vqgan = {n.removeprefix(prefix): tensor for n, tensor in state.items() if n.startswith(prefix)}
    state = {n: tensor for n, tensor in state.items() if not n.startswith(prefix + "decoder.")}
    shutil.copy(source / "config.json", target)
    shutil.copy(source / "text_tokenizer.json", target / "tokenizer.json")
    shutil.copy(source / "drafter" / "config.json", drafter)
    if lumina:
        state, drafter_state = (_widen(part, len(LUMINA)) for part in (state, drafter_state))
        edit(target / "config.json", _longer)
        edit(drafter / "config.json", _longer)
    write_shards(state, target, 2)
    torch.save(drafter_state, drafter / "pytorch_model.bin")
    write_vqgan(vqgan, root / "ckpts" / "chameleon" / "tokenizer")
    return target, drafter
