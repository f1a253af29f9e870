"""LlamaGen: two stages that draw texts, and checkpoints that draw classes. No torch until one is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from models.spec import CKPTS, Checkpoint, Fields, ModelSpec, Shapes, home_of

if TYPE_CHECKING:
    from models.model import Model
    from models.transformer import DecoderConfig

SECOND = 1024  # codes of an image of stage 2
HOME = CKPTS / "llamagen"
OPTIONS = ("vq_path", "text_encoder", "keep_text_encoder", "class_labels")
PROMPT = "cls_embedding."  # the names of what embeds a prompt go on from here


def load(checkpoint: Checkpoint) -> Model:
    """LlamaGen drawing texts or classes."""
    from models.layouts.llamagen import load

    return load(checkpoint)


def decoder_config(fields: Fields) -> DecoderConfig:
    """The decoder of a config.json of the HF-style layout."""
    from models.layouts.llamagen import decoder_config

    return decoder_config(fields)


def places(home: Path, target: Path, base: str | None) -> tuple[Path, ...]:
    """Folders of the VQ model and text encoder: the target's, the one around it, the published layout's."""
    return home_of(target), target.parent, home


def is_stage(name: str, fields: Fields, shapes: Shapes) -> bool:
    """Whether these are of that stage. Classes, and sizes that were not published, count as the first; a .pt
    of texts that does not tell its size could be either, and is neither."""
    prompts = {key.removeprefix("model.") for key in shapes if key.removeprefix("model.").startswith(PROMPT)}
    if not prompts:
        return False
    cells = fields.get("block_size")
    if f"{PROMPT}embedding_table.weight" in prompts:
        return name == "llamagen"
    return cells is not None and (cells == SECOND) == (name == "llamagen2")


LLAMAGEN = ModelSpec(
    name="llamagen",
    about="its stage 1, or one of classes",
    load=load,
    recognises=lambda fields, shapes: is_stage("llamagen", fields, shapes),
    decoder_config=decoder_config,
    places=places,
    home=HOME,
    target="LlamaGen-T2I",
    drafter="trained_drafters/llamagen_drafter",
    options=OPTIONS,
    static_tree="naive_extend_57",
    embedded_prompts=True,
    manifest="llamagen",
)
LLAMAGEN2 = replace(
    LLAMAGEN,
    name="llamagen2",
    about="its stage 2",
    recognises=lambda fields, shapes: is_stage("llamagen2", fields, shapes),
    target="LlamaGen-T2I-2",
    drafter="trained_drafters/llamagen2_drafter",
    manifest="llamagen2",
)
