"""Emu3: a Llama over text and image tokens, rows of codes ended by a token, images of any size and ratio;
transformers' checkpoints as they are. No torch until one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adt_tree.grid import Grid
from models.janus_pro import own_folder
from models.spec import CKPTS, Checkpoint, Fields, ModelSpec

if TYPE_CHECKING:
    from models.model import Model
    from models.transformer import DecoderConfig


def load(checkpoint: Checkpoint) -> Model:
    """Emu3 drawing texts."""
    from models.layouts.emu3 import load

    return load(checkpoint)


def decoder_config(fields: Fields) -> DecoderConfig:
    """The decoder of a config.json."""
    from models.layouts.emu3 import decoder_config

    return decoder_config(fields)


def codec_parameters(fields: Fields) -> int:
    """How many numbers the codec of a vq_config holds."""
    from models.layouts.emu3 import vqvae
    from models.tools.memory import count

    return count(lambda: vqvae({"vq_config": fields}))


def grid_of(size: int, ratio: str, patch: int) -> Grid:
    """Rows and columns of an image of size * size pixels in all, width : height as `ratio` has it, rounded
    as transformers' processor does. ValueError for a ratio or a size that leaves no image."""
    width, _, height = ratio.partition(":")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ValueError(f"--ratio {ratio}: give width:height, as in 16:9")
    scale = (size * size / (int(width) * int(height))) ** 0.5 / patch
    rows, columns = round(int(height) * scale), round(int(width) * scale)
    if rows < 1 or columns < 1:
        raise ValueError(f"--target_size {size} at {ratio}: it leaves no whole cell of {patch} pixels")
    return Grid(rows, columns)


EMU3 = ModelSpec(
    name="emu3",
    about="Emu3-Gen",
    load=load,
    recognises=lambda fields, shapes: fields.get("model_type") == "emu3",
    decoder_config=decoder_config,
    places=own_folder,
    home=CKPTS / "emu3",
    target="Emu3-Gen-hf",
    hub="BAAI/Emu3-Gen-hf",
    drafter="trained_drafters",
    options=("ratio",),
    default_size=720,
    top_k=2048,
    method="self-draft",  # no drafter network is published
    codec_parameters=codec_parameters,
    manifest="emu3",
)
