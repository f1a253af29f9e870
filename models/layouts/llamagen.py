"""Loads LlamaGen: a Llama decoder over a square of codes, after the rows of a text or one row of a class.

Two layouts are published, told apart by the names of their tensors: the original .pt file and a folder as
transformers writes it (HF-style). The VQ model and the text encoder are separate files beside either. Rotary
positions are two-dimensional and zero on the prefix; token id = code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.checkpoint.config import integer, number, read_config
from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module
from models.checkpoint.weights import Weights, read_weights, weights_file
from models.codecs.vq16 import read_vq16
from models.decoder.config import DecoderConfig, read_shape
from models.drafter import LLAMA, DrafterLayout
from models.family import Checkpoint, home_of
from models.layouts.llamagen_prompts import CaptionProjector, T5Text, class_prompts, text_prompts
from models.llama_names import decoder_names, original_names, tied
from models.model import Model, load_networks
from models.target import PromptEncoder

HF_NORM_EPS, ORIGINAL_NORM_EPS, ROPE_BASE = 1e-6, 1e-5, 10000.0  # defaults where a configuration is silent
SPARE = 4096  # positions after the raster, more than any draft tree has nodes
HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}  # width -> heads of B, L, XL, XXL and 3B
CELLS = {"llamagen": 256, "llamagen2": 1024}  # family -> codes of an image of its text-to-image model
STAGES = {"t2i": 256, "t2i2": 1024}  # input_type in a drafter's config.json -> codes of an image


def _over_raster(config: DecoderConfig, cells: int, rows: int) -> DecoderConfig:
    """Returns the configuration for images of `cells` codes, a square, after a prefix of `rows` rows."""
    return replace(
        config,
        raster_side=isqrt(cells),
        raster_start=rows,
        max_positions=rows + cells + SPARE,
        padded_prefix=True,
        half_split=False,
    )


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json of the HF-style layout. KeyError or ValueError names what is missing or wrong."""
    shape = read_shape(config, norm_eps=HF_NORM_EPS)
    shape = replace(shape, rope_theta=number(config, "rope_base", ROPE_BASE))
    # 0 is valid: a drafter's prefix is one row shorter than its target's, and a class has one row.
    rows = integer(config, "cls_token_num", least=0)
    return _over_raster(shape, config["block_size"], rows)


def original_config(
    shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any], cells: int
) -> DecoderConfig:
    """Returns the configuration of an original .pt file, which is published without one, from its tensors.

    fields: known fields of LlamaGen's ModelArgs, which may be empty. cells: codes of an image. KeyError names
    a missing tensor; ValueError names a width whose number of heads is not known.
    """
    vocab_size, width = shapes["tok_embeddings.weight"]
    heads = fields.get("n_head") or HEADS.get(width)
    if not heads:
        raise ValueError(
            f"width {width} is none of LlamaGen's ({', '.join(map(str, HEADS))}), so its number of heads is "
            "not known: put a config.json with n_head beside it"
        )
    qkv_rows = shapes["layers.0.attention.wqkv.weight"][0]
    text = shapes.get("cls_embedding.uncond_embedding")
    shape = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        num_layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        num_heads=heads,
        num_kv_heads=(qkv_rows - width) // (2 * (width // heads)),
        norm_eps=number(fields, "norm_eps", ORIGINAL_NORM_EPS),
        rope_theta=number(fields, "rope_base", ROPE_BASE),
    )
    return _over_raster(shape, cells, text[0] if text else 1)


def drafter_config(config: Mapping[str, Any], target: DecoderConfig) -> DecoderConfig:
    """Reads a drafter's config.json and gives it the target's raster. KeyError names a missing field,
    ValueError a drafter of another stage.

    A drafter pairs each row with the next token, so its prefix is one row shorter than the target's. With
    cls_token_num one less, every code keeps its row and column. The layer has no norm before attention.
    """
    rows, cells = target.raster_start, target.raster_side**2
    stage = STAGES.get(config.get("input_type", ""), cells)
    if stage != cells and cells in STAGES.values():
        raise ValueError(
            f"input_type {config['input_type']} is of the stage that generates {stage} codes, the target "
            f"generates {cells}: give the drafter of its stage"
        )
    return replace(
        decoder_config({**config, "block_size": cells, "cls_token_num": rows - 1}), input_norm=False
    )


SIDECARS = ("config.json", "config_model_args.json")  # configuration beside a .pt file of unpublished size
ENCODERS = ("t5/flan-t5-xl", "flan-t5-xl")


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files of a target, before any weights are read."""

    file: Path
    weights: Weights
    original: bool  # the layout is that of LlamaGen's .pt file
    fields: Mapping[str, Any]  # of config.json; often empty beside a .pt file
    prompt_prefix: str  # of the names of the tensors that embed the prompt

    @property
    def class_conditional(self) -> bool:
        """True if prompts are classes rather than texts."""
        return f"{self.prompt_prefix}embedding_table.weight" in self.weights


def open_target(folder: Path) -> TargetFiles:
    """Opens the target in a folder, or a .pt file. CheckpointError if it is not LlamaGen's."""
    file = weights_file(folder)
    weights = read_weights(file)
    original = "tok_embeddings.weight" in weights
    home = home_of(file)
    if original:
        sidecars = [name for name in SIDECARS if (home / name).is_file()]
        fields = read_config(home, sidecars[0]) if sidecars else {}
    else:
        fields = read_config(home)
    prompt_prefix = "cls_embedding." if original else "model.cls_embedding."
    if not any(name.startswith(prompt_prefix) for name in weights):
        raise CheckpointError(
            f"{file} holds no tensor {prompt_prefix}*: it is not LlamaGen's; give its folder or .pt file, or "
            "another model"
        )
    return TargetFiles(file, weights, original, fields, prompt_prefix)


def shape_of(files: TargetFiles, checkpoint: Checkpoint, patch: int) -> DecoderConfig:
    """Returns the decoder's configuration. patch: side of a cell in pixels. CheckpointError if the files and
    the options disagree on the size of an image."""
    folder, size, cells = checkpoint.folder, checkpoint.options.target_size, CELLS[checkpoint.spec.name]
    if files.original:
        block_size = files.fields.get("block_size")
        if block_size is None and files.class_conditional:
            # The tensors do not tell the size; a published name such as c2i_L_384.pt does.
            named = re.fullmatch(r"c2i_\w+_(256|384)", files.file.stem)
            size = int(named[1]) if named else size
            if size is None:
                raise CheckpointError(
                    f"{files.file} does not say how large its images are, and its name does not end in "
                    "_256.pt or _384.pt as published: give target_size 256 or 384"
                )
            block_size = (size // patch) ** 2
        shapes = files.weights.shapes
        with reading(files.file):
            shape = original_config(shapes, files.fields, block_size or cells)
    else:
        with reading(folder / "config.json"):
            shape = decoder_config(files.fields)
    checkpoint.refuse_other_size(shape.raster_side * patch)
    return shape


def drafter_fields(shape: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json of a new drafter, whose layer has the target's shape."""
    stage = next((name for name, cells in STAGES.items() if cells == shape.raster_side**2), None)
    fields = LLAMA.fields(shape) | {"rms_norm_eps": HF_NORM_EPS, "rope_base": shape.rope_theta}
    return fields | ({"input_type": stage} if stage else {})


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    files = open_target(checkpoint.folder)
    weights = files.weights
    vq = "vq_ds16_c2i.pt" if files.class_conditional else "vq_ds16_t2i.pt"
    pixels = checkpoint.part("VQ decoder", (vq,), "vq_path")
    codec = read_vq16(pixels, checkpoint.device)
    shape = shape_of(files, checkpoint, codec.config.patch_size)
    names = (original_names if files.original else decoder_names)(shape)
    names = tied(names, weights, files.fields)
    prompts = _prompts(files, checkpoint, shape)
    layout = DrafterLayout(lambda fields: drafter_config(fields, shape), drafter_fields)
    grid = Grid(shape.raster_side, shape.raster_side)
    return load_networks(checkpoint, shape, weights, names, grid, prompts, codec, layout)


def _prompts(files: TargetFiles, checkpoint: Checkpoint, shape: DecoderConfig) -> PromptEncoder:
    """Returns the encoder of texts or classes. T5's weights are loaded later, for the first text."""
    cells = CellIds(range(shape.vocab_size))
    embedding = files.weights.below(files.prompt_prefix).placed(checkpoint.device, checkpoint.dtype)
    if files.class_conditional:
        if encoder := checkpoint.options.text_encoder:
            raise CheckpointError(
                f"text_encoder {encoder}: this model takes classes, not texts; leave it out"
            )
        return class_prompts(embedding["embedding_table.weight"], cells)
    rows = shape.raster_start
    with reading(files.file):
        features = embedding.shapes["uncond_embedding"][1]
    options = checkpoint.options
    folder = checkpoint.part("text encoder", ENCODERS, "text_encoder")
    text = T5Text(folder, features, rows, checkpoint.device)
    project = load_module(lambda: CaptionProjector(rows, features, shape.hidden_size), embedding, files.file)
    return text_prompts(text, project, cells, options.keep_text_encoder)
