"""Anole and the embedded emoji model: the Chameleon layout with a raster of codes and no line tokens.

Everything is read from the checkpoint's own files: ids from config.json's vocabulary_map, the grid from
vq_config. No torch until one is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.grid import Grid
from models.errors import CheckpointError
from models.spec import CKPTS, EMBEDDED_TREE, Checkpoint, Fields, ModelSpec, Shapes

if TYPE_CHECKING:
    from models.model import Model
    from models.transformer import DecoderConfig

VQ_DECODER = "model.vqmodel.decoder."  # of a checkpoint that needs no VQGAN beside it


def load(checkpoint: Checkpoint) -> Model:
    """Anole, or the embedded model. A target_size that is not the checkpoint's own is refused."""
    from models.checkpoint.folder import read_fields
    from models.layouts.chameleon_files import Prompts, open_chameleon

    opened, size = open_chameleon(checkpoint, shared_norms=False), checkpoint.options.target_size
    grid = read_fields(checkpoint.folder, lambda: grid_of(opened.config))
    own = grid.height * opened.codec.config.patch_size
    if size not in (None, own):
        raise CheckpointError(
            f"--target_size {size}: this model draws {own} px and no other size; leave it out"
        )
    layout, begin = opened.layout, opened.layout.begin_of_image
    return opened.model(grid, Prompts(opened.tokenizer, layout, (begin,), (layout.begin_of_text, begin)))


def grid_of(config: Mapping[str, Any]) -> Grid:
    """The raster of one image: resolution over the encoder's stride, 2 for each level but the first."""
    vq = config["vq_config"]
    side = vq["resolution"] >> (len(vq["channel_multiplier"]) - 1)
    return Grid(side, side)


def decoder_config(fields: Fields) -> DecoderConfig:
    """The decoder of a config.json of the Chameleon layout."""
    from models.layouts.chameleon import decoder_config

    return decoder_config(fields)


def chameleon_places(home: Path, target: Path, base: str | None) -> tuple[Path, ...]:
    """Folders of text_tokenizer.json, vqgan.ckpt and vqgan.yaml: the one given alone, else the target's own
    and the published layout's."""
    inner = Path("chameleon", "tokenizer")
    if base is not None:
        return Path(base), Path(base) / inner
    return target, target.parent / inner, home / inner


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
    decoder_config=decoder_config,
    places=chameleon_places,
    home=CKPTS / "emoji",
    tree=EMBEDDED_TREE,
    method="self-draft",  # the fastest exact one, as bench measured it
    fp32_on_cpu=True,
    splittable=True,
    reference=True,
)
ANOLE = ModelSpec(
    name="anole",
    about="Anole-7b",
    load=load,
    recognises=lambda fields, shapes: shares_norms(fields, shapes) is False and not has_codec(shapes),
    decoder_config=decoder_config,
    places=chameleon_places,
    home=CKPTS / "anole",
    target="Anole-7b-v0.1-hf",
    drafter="trained_drafters/anole_drafter",
    options=("tokenizer_base_path",),
    static_tree="naive_extend_57",
    splittable=True,
    token_shift="auto",
    reference=True,
    manifest="anole",
)
