"""Anole and the embedded emoji model: the Chameleon layout with a raster of codes and no line tokens.

Everything is read from the checkpoint's own files: ids from config.json's vocabulary_map, the grid from the
codec's configuration. No torch until one is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adt_tree.grid import Grid
from models.spec import CKPTS, EMBEDDED_TREE, Checkpoint, Fields, ModelSpec, Shapes, late

if TYPE_CHECKING:
    from models.layouts.chameleon_files import ChameleonFiles
    from models.model import Model

VQ_DECODER = "model.vqmodel.decoder."  # of a checkpoint that needs no VQGAN beside it


def load(checkpoint: Checkpoint) -> Model:
    """Anole, or the embedded model, from its files."""
    from models.layouts.chameleon_files import read_chameleon

    return assemble(read_chameleon(checkpoint, shared_norms=False))


def assemble(opened: ChameleonFiles) -> Model:
    """Anole of an opened checkpoint, at the codec's own resolution."""
    from models.layouts.chameleon_files import prompt_encoder

    shape, layout, begin = opened.codec.config, opened.layout, opened.layout.begin_of_image
    opened.checkpoint.refuse_other_size(shape.resolution)
    side = shape.resolution // shape.patch_size
    prompts = prompt_encoder(opened.tokenizer, layout, (begin,), (layout.begin_of_text, begin))
    return opened.model(Grid(side, side), prompts)


def shares_norms(fields: Fields, shapes: Shapes) -> bool | None:
    """Whether heads share the norm of their queries, as Lumina-mGPT's do; None if this is not the Chameleon
    layout."""
    norm, heads = shapes.get("model.layers.0.self_attn.q_norm.weight"), fields.get("num_attention_heads")
    if norm is None or not isinstance(heads, int) or "vocabulary_map" not in fields:
        return None
    return norm[0] < heads


def has_codec(shapes: Shapes) -> bool:
    """Whether the checkpoint holds a VQ decoder of its own."""
    return any(name.startswith(VQ_DECODER) for name in shapes)


EMOJI_SPEC = ModelSpec(
    name="emoji",
    about="the embedded model",
    load=load,
    recognises=lambda fields, shapes: shares_norms(fields, shapes) is False and has_codec(shapes),
    decoder_config=late("models.layouts.chameleon", "decoder_config"),
    home=CKPTS / "emoji",
    tree=EMBEDDED_TREE,
    method="self-draft",  # the fastest exact one, as bench measured it
    fp32_on_cpu=True,
    reference=True,
)
ANOLE = ModelSpec(
    name="anole",
    about="Anole-7b",
    load=load,
    recognises=lambda fields, shapes: shares_norms(fields, shapes) is False and not has_codec(shapes),
    decoder_config=late("models.layouts.chameleon", "decoder_config"),
    home=CKPTS / "anole",
    target="Anole-7b-v0.1-hf",
    drafter="trained_drafters/anole_drafter",
    options=("tokenizer_base_path",),
    static_tree="naive_extend_57",
    token_shift="auto",
    reference=True,
    manifest="anole",
)
