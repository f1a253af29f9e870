"""Janus-Pro: a Llama that takes image codes through an aligner of its own and tells them through a head of
its own; transformers' checkpoints as they are. No torch until one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from models.spec import CKPTS, Checkpoint, Fields, ModelSpec

if TYPE_CHECKING:
    from models.model import Model
    from models.transformer import DecoderConfig


def load(checkpoint: Checkpoint) -> Model:
    """Janus-Pro drawing texts."""
    from models.layouts.janus import load

    return load(checkpoint)


def decoder_config(fields: Fields) -> DecoderConfig:
    """The decoder of a config.json."""
    from models.layouts.janus import decoder_config

    return decoder_config(fields)


def own_folder(home: Path, target: Path, base: str | None) -> tuple[Path, ...]:
    """All files lie in the target's folder."""
    return (target,)


JANUS_PRO = ModelSpec(
    name="janus_pro",
    about="Janus-Pro-1B; 7B by --model_path",
    load=load,
    recognises=lambda fields, shapes: fields.get("model_type") == "janus",
    decoder_config=decoder_config,
    places=own_folder,
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
