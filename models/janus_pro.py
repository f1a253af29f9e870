"""Janus-Pro: a Llama that takes image codes through an aligner of its own and tells them through a head of
its own; transformers' checkpoints as they are. No torch until one is loaded."""

from __future__ import annotations

from models.spec import CKPTS, ModelSpec, late

JANUS_PRO = ModelSpec(
    name="janus_pro",
    about="Janus-Pro-1B; 7B by --model_path",
    load=late("models.layouts.janus", "load"),
    recognises=lambda fields, shapes: fields.get("model_type") == "janus",
    decoder_config=late("models.layouts.janus", "decoder_config"),
    home=CKPTS / "janus_pro",
    target="Janus-Pro-1B",
    hub="deepseek-community/Janus-Pro-1B",
    drafter="trained_drafters",
    guidance=5.0,
    top_k=0,
    method="self-draft",  # no drafter network is published
    reference=True,
    manifest="janus_pro",
)
