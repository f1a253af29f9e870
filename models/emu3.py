"""Emu3: a Llama over text and image tokens, rows of codes ended by a token, images of any size and ratio;
transformers' checkpoints as they are. No torch until one is loaded."""

from __future__ import annotations

from models.spec import CKPTS, ModelSpec, late

EMU3 = ModelSpec(
    name="emu3",
    about="Emu3-Gen",
    load=late("models.layouts.emu3", "load"),
    recognises=lambda fields, shapes: fields.get("model_type") == "emu3",
    decoder_config=late("models.layouts.emu3", "decoder_config"),
    home=CKPTS / "emu3",
    target="Emu3-Gen-hf",
    hub="BAAI/Emu3-Gen-hf",
    drafter="trained_drafters",
    options=("ratio",),
    default_size=720,
    top_k=2048,
    method="self-draft",  # no drafter network is published
    codec_parameters=late("models.layouts.emu3", "codec_parameters"),
    manifest="emu3",
)
