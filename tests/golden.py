"""Readers of tests/goldens, and the recorded Anole-shaped models built from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.chameleon import decoder_config, from_chameleon
from models.drafter import DrafterNet, drafter_config, from_published
from models.transformer import Decoder

FOLDER = Path(__file__).parent / "goldens"
FIRST_CODE = 4
UNCONDITIONAL = [0, 8197]


def tensors(name: str) -> dict[str, Tensor]:
    """One safetensors file."""
    return load_file(FOLDER / f"{name}.safetensors")


def values(name: str) -> Any:
    """One JSON file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Anole:
    """The recorded target and drafter; rows of the tables that no recorded run reads are zero."""

    decoder: Decoder
    net: DrafterNet
    nearest: Tensor
    prompts: list[list[int]]


def _spread(rows: Tensor, values: Tensor, size: int) -> Tensor:
    return values.new_zeros((size, *values.shape[1:])).index_copy(0, rows, values)


def anole() -> Anole:
    """Read the recorded models."""
    config, state, drafter = values("anole"), tensors("anole_target"), tensors("anole_drafter")
    shape, drafter_shape = decoder_config(config["target"]), drafter_config(config["drafter"])
    rows, vocabulary = state["rows"], shape.vocab_size
    head = torch.cat([tensors(f"anole_head_{part}")["head"] for part in "ab"])
    state["model.embed_tokens.weight"] = _spread(rows, state["embed_rows"], vocabulary)
    state["lm_head.weight"] = _spread(torch.arange(len(head)) + FIRST_CODE, head, vocabulary)
    drafter["embed_tokens.weight"] = _spread(rows, drafter["embed_rows"], vocabulary)
    decoder, net = Decoder(shape), DrafterNet(drafter_shape)
    decoder.load_state_dict(from_chameleon(state, shape))
    net.load_state_dict(from_published(drafter, drafter_shape))
    nearest = _spread(state["nearest_rows"], state["nearest"].long(), len(head))
    return Anole(
        decoder.eval().requires_grad_(False), net.eval().requires_grad_(False), nearest, config["prompts"]
    )
