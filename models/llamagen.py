"""LlamaGen: two stages that draw texts, and checkpoints that draw classes. No torch until one is loaded."""

from __future__ import annotations

from dataclasses import replace

from models.spec import CKPTS, Fields, ModelSpec, Shapes, late

SECOND = 1024  # codes of an image of stage 2
HOME = CKPTS / "llamagen"
OPTIONS = ("vq_path", "text_encoder", "class_labels")
PROMPT = "cls_embedding."  # the names of what embeds a prompt go on from here


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
    load=late("models.layouts.llamagen", "load"),
    recognises=lambda fields, shapes: is_stage("llamagen", fields, shapes),
    decoder_config=late("models.layouts.llamagen", "decoder_config"),
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
