"""LlamaGen's files -> a model: a Llama decoder over a square of codes behind text rows or one class row.

Its own .pt and the HF-style folder are told apart by their tensors; the VQ model and the text encoder lie
beside them.

Published facts: two-dimensional rotary positions that are zero on the prefix, token id = codebook id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.checkpoint.config import (
    MOST_POSITIONS,
    MOST_WIDTH,
    check_whole,
    positive,
    read_config,
    read_fields,
)
from models.checkpoint.hub import locate
from models.checkpoint.meta_init import build, expected, require
from models.checkpoint.weights import Weights, read_weights, weights_file
from models.codecs.vq16 import read_vq16
from models.drafter import Layout
from models.layouts.llama import decoder_names, gather, original_names, scatter
from models.layouts.llamagen_prompts import CaptionProjector, T5Text, class_prompts, text_prompts
from models.model import Model, load_networks
from models.spec import Checkpoint, home_of
from models.target import PromptEncoder
from models.transformer import Decoder, DecoderConfig, read_shape

HF_NORM_EPS, ORIGINAL_NORM_EPS, ROPE_BASE = 1e-6, 1e-5, 10000.0  # where a configuration is silent
SPARE = 4096  # positions behind the raster: more than any tree has nodes
HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}  # of the published widths: B, L, XL, XXL, 3B
CELLS = {"llamagen": 256, "llamagen2": 1024}  # a family -> codes of an image from a text
STAGES = {"t2i": 256, "t2i2": 1024}  # a drafter's input_type -> codes of an image


def _over_raster(config: DecoderConfig, cells: int, rows: int) -> DecoderConfig:
    """The decoder for images of `cells` codes behind a prefix of `rows`."""
    side = isqrt(check_whole("block_size", cells, MOST_POSITIONS))
    if side * side != cells:
        raise ValueError(f"block_size {cells}: an image is a square of codes")
    return replace(config, raster_side=side, raster_start=rows, max_positions=rows + cells + SPARE)


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """From the config.json of the HF-style layout. KeyError or ValueError names what is missing or unfit."""
    shape = read_shape(config, norm_eps=HF_NORM_EPS)
    shape = replace(shape, rope_theta=positive(config, "rope_base", ROPE_BASE), qk_norm=False)
    # A drafter's prefix is one row shorter than the target's: of one class row nothing is left.
    rows = check_whole("cls_token_num", config["cls_token_num"], MOST_POSITIONS, least=0)
    return _over_raster(shape, config["block_size"], rows)


def original_config(
    shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any], cells: int
) -> DecoderConfig:
    """From the tensors of LlamaGen's own .pt, which comes without a configuration.

    fields: ModelArgs under their own names, as far as known. cells: codes of an image. KeyError names a
    tensor that is missing; ValueError a width whose number of heads is not known.
    """
    vocab_size, width = shapes["tok_embeddings.weight"]
    heads = check_whole("n_head", fields.get("n_head") or HEADS.get(width, 0), MOST_WIDTH, least=0)
    if not heads:
        raise ValueError(
            f"width {width} is none of LlamaGen's ({', '.join(map(str, HEADS))}) and the file does not say "
            "how many heads share it: put a config.json with n_head beside it"
        )
    fused = shapes["layers.0.attention.wqkv.weight"][0]
    text = shapes.get("cls_embedding.uncond_embedding")
    shape = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        num_layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        num_heads=heads,
        num_kv_heads=(fused - width) // (2 * (width // heads)),
        norm_eps=positive(fields, "norm_eps", ORIGINAL_NORM_EPS),
        rope_theta=positive(fields, "rope_base", ROPE_BASE),
        qk_norm=False,
    )
    return _over_raster(shape, cells, text[0] if text else 1)


def drafter_config(config: Mapping[str, Any], target: DecoderConfig) -> DecoderConfig:
    """From a drafter's config.json, over the target's raster. KeyError names a field that is missing.

    A drafter pairs a row with the token behind it, so a prefix is one entry shorter than the target's and its
    codes keep their own row and column. Its layer has no norm before attention.
    """
    rows, cells = target.raster_start, target.raster_side**2
    stage = STAGES.get(config.get("input_type", ""), cells)
    if stage != cells and cells in STAGES.values():
        raise ValueError(
            f"input_type {config['input_type']} is of the stage that draws {stage} codes, the target draws "
            f"{cells}: give the drafter of its stage"
        )
    return replace(
        decoder_config({**config, "block_size": cells, "cls_token_num": rows - 1}), input_norm=False
    )


SIDECARS = ("config.json", "config_model_args.json")  # beside a .pt of a size that was not published
ENCODERS = (Path("t5", "flan-t5-xl"), Path("flan-t5-xl"))


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target's files, nothing of them loaded."""

    file: Path
    weights: Weights
    original: bool  # the layout of LlamaGen's own .pt
    fields: Mapping[str, Any]  # config.json; of an original .pt what stands beside it, often nothing
    start: str  # of the names of the tensors that embed the prompt

    @property
    def of_classes(self) -> bool:
        """Whether it draws classes rather than texts."""
        return f"{self.start}embedding_table.weight" in self.weights


def open_target(folder: Path) -> TargetFiles:
    """The target in a folder, or in a file. CheckpointError if it is no LlamaGen."""
    file = weights_file(folder)
    weights = read_weights(file)
    original = "tok_embeddings.weight" in weights
    home = home_of(file)
    if original:
        found = [name for name in SIDECARS if (home / name).is_file()]
        fields = read_config(home, found[0]) if found else {}
    else:
        fields = read_config(home)
        weights = weights.tied(fields)
    start = "cls_embedding." if original else "model.cls_embedding."
    if not any(name.startswith(start) for name in weights):
        raise CheckpointError(
            f"{file} holds no tensor {start}*: it is no LlamaGen; give its folder or .pt, or another --model"
        )
    return TargetFiles(file, weights, original, fields, start)


def shape_of(opened: TargetFiles, checkpoint: Checkpoint, patch: int) -> DecoderConfig:
    """The decoder over the raster that is drawn; patch: pixels along the side of a cell. CheckpointError if
    files and options disagree on the size of an image."""
    folder, size, cells = checkpoint.folder, checkpoint.options.target_size, CELLS[checkpoint.spec.name]
    if opened.original:
        known = opened.fields.get("block_size")
        if known is None and opened.of_classes:
            if size is None:
                raise CheckpointError(
                    f"{opened.file} does not say how large its images are: give --target_size 256 or 384"
                )
            known = (size // patch) ** 2
        shapes = opened.weights.shapes
        shape = read_fields(opened.file, lambda: original_config(shapes, opened.fields, known or cells))
    else:
        shape = read_fields(folder, lambda: decoder_config(opened.fields))
    drawn = shape.raster_side**2
    if not opened.of_classes and drawn != cells and drawn in CELLS.values():
        other = next(name for name, count in CELLS.items() if count == drawn)
        raise CheckpointError(
            f"{folder} draws {drawn} codes: say --model {other}, not {checkpoint.spec.name}"
        )
    checkpoint.refuse_other_size(shape.raster_side * patch)
    return shape


def _beside(
    checkpoint: Checkpoint, names: tuple[Path, ...], given: str | None, what: str, option: str
) -> Path:
    """A file or folder that belongs to the target: as given, or the first of names in its places."""
    if given is not None:
        return locate(given)
    folder = checkpoint.folder
    places = (home_of(folder), folder.parent, checkpoint.spec.home)
    candidates = [place / name for place in places for name in names]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        looked = ", ".join(dict.fromkeys(str(path) for path in candidates))
        raise CheckpointError(f"{folder}: no {what} ({looked}): put it there or say where by {option}")
    return found


def drafter_fields(shape: DecoderConfig) -> dict[str, Any]:
    """config.json of a drafter whose layer has the target's shape."""
    stage = next((name for name, cells in STAGES.items() if cells == shape.raster_side**2), None)
    return {
        "model_type": "llama", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": HF_NORM_EPS, "rope_base": shape.rope_theta, "hidden_act": "silu", "bias": True,
        **({"input_type": stage} if stage else {}),
    }  # fmt: skip


def load(checkpoint: Checkpoint) -> Model:
    """LlamaGen drawing texts or classes. CheckpointError names what is missing or does not fit."""
    opened = open_target(checkpoint.folder)
    file, weights, options = opened.file, opened.weights, checkpoint.options
    vq = "vq_ds16_c2i.pt" if opened.of_classes else "vq_ds16_t2i.pt"
    pixels = _beside(checkpoint, (Path(vq),), options.vq_path, "VQ decoder", "--vq_path")
    codec = read_vq16(pixels, checkpoint.device)
    shape = shape_of(opened, checkpoint, codec.config.patch_size)
    names = (original_names if opened.original else decoder_names)(shape)
    wanted = expected(lambda: Decoder(shape), lambda own: scatter(own, names, shape))
    require(file, weights, wanted, "fetch it again, or the config.json that belongs to it")
    prompts = _prompts(opened, checkpoint, shape)
    layout = Layout(lambda fields: drafter_config(fields, shape), drafter_fields)
    grid, to_ours = Grid(shape.raster_side, shape.raster_side), partial(gather, names=names, config=shape)
    return load_networks(checkpoint, shape, weights, to_ours, layout, grid, prompts, codec)


def _prompts(opened: TargetFiles, checkpoint: Checkpoint, shape: DecoderConfig) -> PromptEncoder:
    """The text side, or the class table; nothing of a text encoder is loaded yet."""
    own = opened.weights.below(opened.start).placed(checkpoint.device, checkpoint.dtype)
    if opened.of_classes:
        return class_prompts(own["embedding_table.weight"], shape.vocab_size)
    if "uncond_embedding" not in own:
        raise CheckpointError(f"{opened.file}: tensor {opened.start}uncond_embedding is missing")
    rows, features = own.shapes["uncond_embedding"]
    if rows != shape.raster_start:
        raise CheckpointError(
            f"{opened.file}: {opened.start}uncond_embedding has {rows} rows, config.json's cls_token_num is "
            f"{shape.raster_start}: they belong to different models"
        )
    options = checkpoint.options
    folder = _beside(checkpoint, ENCODERS, options.text_encoder, "text encoder", "--text_encoder")
    text = T5Text(folder, features, rows, checkpoint.device)
    project = build(lambda: CaptionProjector(rows, features, shape.hidden_size), own, opened.file)
    return text_prompts(text, project, shape.vocab_size, options.keep_text_encoder)
