"""Readers of tests/goldens, and the recorded models that are built from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.decoder.packed import pack
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.layouts.chameleon import decoder_config
from models.layouts.llamagen import decoder_config as llamagen_config
from models.layouts.llamagen import drafter_config as llamagen_drafter_config
from models.layouts.llamagen import original_config
from models.layouts.llamagen_prompts import CaptionProjector, PaddedPrompt
from models.llama_names import decoder_names, drafter_names, gather, original_names
from models.model import Model
from models.target import ARTarget, EmbeddedPrefix

FOLDER = Path(__file__).parent.parent / "goldens"
FIRST_CODE = 4
UNCONDITIONAL = [0, 8197]


def tensors(name: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file."""
    return load_file(FOLDER / f"{name}.safetensors")


def close(actual: Tensor, expected: Tensor) -> None:
    """Compares tensors within the recorded tolerance."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def same_as_transformers(model: Model, theirs: Any, tokens: Tensor) -> None:
    """Compares the features and logits of codes along sequences with those of a causal model of
    transformers."""
    hidden = theirs.model(input_ids=tokens).last_hidden_state
    logits = theirs.lm_head(hidden)[..., model.first_code : model.first_code + model.num_codes]
    features = model.decoder.causal(tokens)
    close(features, hidden)
    close(model.decoder.head(features), logits)
    assert logits.abs().max() > 1  # far from the tolerance


def values(name: str) -> Any:
    """Returns the content of a JSON file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Anole:
    """The recorded target and drafter. Rows of their tables that no recorded run reads are zero."""

    decoder: Decoder
    net: DrafterNet
    nearest: Tensor
    prompts: list[list[int]]


def _spread(rows: Tensor, values: Tensor, size: int) -> Tensor:
    return values.new_zeros((size, *values.shape[1:])).index_copy(0, rows, values)


def anole() -> Anole:
    """Builds the recorded models."""
    config, state, drafter = values("anole"), tensors("anole_target"), tensors("anole_drafter")
    shape, drafter_shape = decoder_config(config["target"]), decoder_config(config["drafter"])
    rows, vocabulary = state["rows"], shape.vocab_size
    head = torch.cat([tensors(f"anole_head_{part}")["head"] for part in "ab"])
    state["model.embed_tokens.weight"] = _spread(rows, state["embed_rows"], vocabulary)
    state["lm_head.weight"] = _spread(torch.arange(len(head)) + FIRST_CODE, head, vocabulary)
    drafter["embed_tokens.weight"] = _spread(rows, drafter["embed_rows"], vocabulary)
    decoder, net = Decoder(shape), DrafterNet(drafter_shape)
    decoder.load_state_dict(gather(state, decoder_names(shape), shape))
    net.load_state_dict(gather(drafter, drafter_names(drafter_shape, "fc.bias" in drafter), drafter_shape))
    nearest = _spread(state["nearest_rows"], state["nearest"].long(), len(head))
    return Anole(
        decoder.eval().requires_grad_(False), net.eval().requires_grad_(False), nearest, config["prompts"]
    )


class AttendingPrompt(PaddedPrompt):
    """A prompt whose rows of padding also attend to all others, as in the released code in fp32."""

    def embed(self, branch: int, decoder: Decoder) -> EmbeddedPrefix:
        prefix = super().embed(branch, decoder)
        prefix.mask[:, : prefix.padding, prefix.padding :] = True
        return prefix


@dataclass(frozen=True)
class LlamaGen:
    """A recorded LlamaGen model."""

    decoder: Decoder
    conditioner: CaptionProjector | Tensor  # of captions, or the table of classes

    @property
    def num_codes(self) -> int:
        """Returns the size of the codebook."""
        return self.decoder.config.vocab_size

    def prompts(self, padding_attends: bool = False) -> list[PaddedPrompt]:
        """Returns the recorded prompts: texts of 120 and of 9 rows, or two classes."""
        if isinstance(self.conditioner, Tensor):
            table, ids = self.conditioner, tensors("llamagen/c2i_expected")["class_ids"]
            return [PaddedPrompt(table[n][None], table[-1:]) for n in ids]
        recorded, project = tensors("llamagen/t2i_expected"), self.conditioner
        nothing = project(project.uncond_embedding)
        rows = [project(recorded[f"t5_{length}"]) for length in ("long", "short")]
        kind = AttendingPrompt if padding_attends else PaddedPrompt
        return [kind(text, nothing) for text in rows]

    def drafter_net(self) -> DrafterNet:
        """Returns the recorded drafter."""
        state = tensors("llamagen/drafter")
        stage = "t2i2" if self.decoder.config.raster_side == 32 else "t2i"
        fields = values("llamagen/configs")["drafter"] | {"input_type": stage}
        config = llamagen_drafter_config(fields, self.decoder.config)
        net = DrafterNet(config)
        net.load_state_dict(gather(state, drafter_names(config, bias=True), config))
        return net.eval().requires_grad_(False)

    def target(self, slots: int, nodes: int, codes: int | None = None) -> ARTarget:
        """Returns a target under guidance, for whole images or for the first `codes` codes of each."""
        config = self.decoder.config
        side = config.raster_side
        grid = Grid(side, side) if codes is None else Grid(codes, 1)
        pack(self.decoder)
        ids = CellIds(range(config.vocab_size))
        return ARTarget(self.decoder, grid, ids, slots, 2, config.raster_start, nodes)


@cache
def llamagen(family: str, side: int) -> LlamaGen:
    """Builds a recorded model: t2i from the HF-style layout, c2i from the original one. Tests must not change
    it, except by packing its layers."""
    fields = values("llamagen/configs")
    conditioner: CaptionProjector | Tensor
    if family == "c2i":
        state = tensors("llamagen/c2i")
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        config = original_config(shapes, fields["c2i"], side * side)
        conditioner = state["cls_embedding.embedding_table.weight"]
    else:
        state, start = tensors("llamagen/t2i-1") | tensors("llamagen/t2i-2"), "model.cls_embedding."
        config = llamagen_config({**fields["t2i"], "block_size": side * side})
        rows, features = state["model.cls_embedding.uncond_embedding"].shape
        conditioner = CaptionProjector(rows, features, config.hidden_size).eval().requires_grad_(False)
        projector_state = {
            name[len(start) :]: tensor for name, tensor in state.items() if name.startswith(start)
        }
        conditioner.load_state_dict(projector_state)
    decoder = Decoder(config)
    names = original_names(config) if family == "c2i" else decoder_names(config)
    decoder.load_state_dict(gather(state, names, config))
    return LlamaGen(decoder.eval().requires_grad_(False), conditioner)
