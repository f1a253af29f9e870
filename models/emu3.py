"""Emu3: a Llama over text and image tokens, rows of codes ended by a token, images of any size and ratio;
transformers' checkpoints as they are. No torch until one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from models.layouts.emu3 import codec_parameters

    return codec_parameters(fields)


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
