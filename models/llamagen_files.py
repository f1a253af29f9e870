"""LlamaGen's files -> a model: the original .pt or the HF-style folder, told apart by their tensors, the VQ
model and the text encoder beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adt_tree.grid import Grid
from models.checkpoint import build, read_config, read_fields
from models.drafter import Layout, load_drafter
from models.errors import CheckpointError
from models.fit import expected, require
from models.hub import locate
from models.llama import decoder_names, drafter_names, gather, scatter
from models.llamagen import (
    CaptionProjector,
    ClassPrompts,
    LabelEmbedder,
    TextPrompts,
    decoder_config,
    drafter_config,
    original_config,
)
from models.model import Model, Source
from models.t5 import T5Text
from models.transformer import Decoder, DecoderConfig
from models.vq16 import read_vq16
from models.weights import Weights, read_weights

CELLS = {"llamagen": 256, "llamagen2": 1024}  # --model -> codes of an image of its stage, from a text
SIDECARS = ("config.json", "config_model_args.json")  # beside a .pt of a size that was not published
ENCODERS = (Path("t5", "flan-t5-xl"), Path("flan-t5-xl"))


@dataclass(frozen=True, slots=True)
class Opened:
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


def open_target(folder: Path) -> Opened:
    """The target in a folder, or in a file. CheckpointError if it is no LlamaGen."""
    file = _weights_file(folder)
    weights = read_weights(file)
    original = "tok_embeddings.weight" in weights
    home = file.parent if file.is_file() else file
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
    return Opened(file, weights, original, fields, start)


def _weights_file(folder: Path) -> Path:
    """The .pt of a folder that holds one and no weights under the HF-style names; else the path itself."""
    inside = sorted(folder.glob("*.pt")) if folder.is_dir() else []
    inside = [path for path in inside if not path.name.startswith("vq_")]
    if any(folder.glob("model*.safetensors*")) or any(folder.glob("pytorch_model*")) or len(inside) != 1:
        return folder
    return inside[0]


def shape_of(opened: Opened, source: Source, patch: int) -> DecoderConfig:
    """The decoder over the raster that is drawn; patch: pixels along the side of a cell. CheckpointError if
    files and options disagree on the size of an image."""
    folder, size, cells = source.folder, source.target_size, CELLS[source.name]
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
        raise CheckpointError(f"{folder} draws {drawn} codes: say --model {other}, not {source.name}")
    side = shape.raster_side * patch
    if size not in (None, side):
        raise CheckpointError(
            f"--target_size {size}: this model draws {side} px and no other size; leave it out"
        )
    return shape


def _beside(source: Source, names: tuple[Path, ...], given: str | None, what: str, option: str) -> Path:
    """A file or folder that belongs to the target: as given, or the first of names in the source's places."""
    if given is not None:
        return locate(given)
    candidates = [place / name for place in source.places for name in names]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        looked = ", ".join(dict.fromkeys(str(path) for path in candidates))
        raise CheckpointError(f"{source.folder}: no {what} ({looked}): put it there or say where by {option}")
    return found


def drafter_layout(target: DecoderConfig) -> Layout:
    """How LlamaGen's drafters are published, over the target's raster."""
    return Layout(
        lambda config: drafter_config(config, target),
        lambda state, shape: gather(state, drafter_names(shape, "fc.bias" in state)),
        lambda state, shape: scatter(state, drafter_names(shape, "fc.bias" in state), shape),
    )


def load(source: Source) -> Model:
    """LlamaGen drawing texts or classes. CheckpointError names what is missing or does not fit."""
    opened = open_target(source.folder)
    file, weights, extras = opened.file, opened.weights, source.extras
    vq = "vq_ds16_c2i.pt" if opened.of_classes else "vq_ds16_t2i.pt"
    codec, codebook = read_vq16(
        _beside(source, (Path(vq),), extras.vq_path, "VQ decoder", "--vq_path"), source.device
    )
    shape = shape_of(opened, source, codec.config.patch_size)
    if codec.config.num_embeddings != shape.vocab_size:
        raise CheckpointError(
            f"{file}: {shape.vocab_size} codes, the VQ decoder has {codec.config.num_embeddings}: "
            "they belong to different models"
        )
    names = decoder_names(shape, opened.original)
    wanted = expected(lambda: Decoder(shape), lambda own: scatter(own, names, shape))
    require(file, weights, wanted, "fetch it again, or the config.json that belongs to it")
    prompts = _prompts(opened, source, shape)
    net, drafter_sha = None, None
    if source.drafter is not None:
        layout = drafter_layout(shape)
        net, drafter_sha = load_drafter(source.drafter, shape, source.dtype, source.device, layout)
    placed = weights.placed(source.device, source.dtype)
    decoder = build(lambda: Decoder(shape), lambda: gather(placed, names), source.dtype, source.device, file)
    grid = Grid(shape.raster_side, shape.raster_side)
    classes = prompts.num_classes if isinstance(prompts, ClassPrompts) else 0
    return Model(
        source.name, grid, prompts, decoder, codebook, codec, net, placed.digest(), drafter_sha,
        num_classes=classes,
    )  # fmt: skip


def _prompts(opened: Opened, source: Source, shape: DecoderConfig) -> TextPrompts | ClassPrompts:
    """The text side, or the class table; nothing of a text encoder is loaded yet."""
    own = opened.weights.below(opened.start).placed(source.device, source.dtype)
    width, place = shape.hidden_size, (source.dtype, source.device, opened.file)
    if opened.of_classes:
        rows = own.shapes["embedding_table.weight"][0]
        return ClassPrompts(build(lambda: LabelEmbedder(rows, width), lambda: own, *place), shape.vocab_size)
    if "uncond_embedding" not in own:
        raise CheckpointError(f"{opened.file}: tensor {opened.start}uncond_embedding is missing")
    rows, features = own.shapes["uncond_embedding"]
    if rows != shape.raster_start:
        raise CheckpointError(
            f"{opened.file}: {opened.start}uncond_embedding has {rows} rows, config.json's cls_token_num is "
            f"{shape.raster_start}: they belong to different models"
        )
    extras = source.extras
    folder = _beside(source, ENCODERS, extras.text_encoder, "text encoder", "--text_encoder")
    text = T5Text(folder, features, rows, source.device)
    project = build(lambda: CaptionProjector(rows, features, width), lambda: own, *place)
    return TextPrompts(text, project, shape.vocab_size, extras.keep_text_encoder)
