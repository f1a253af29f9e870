"""The table of model families. A new family is one ModelFamily here and, unless another family has the same
layout, a reader of its files in models/layouts."""

from __future__ import annotations

from dataclasses import replace

from adt_tree.errors import CheckpointError
from adt_tree.policy import TreeShape
from models.family import CKPTS, EMBEDDED_TREE, Fields, ModelFamily, Shapes

VQ_DECODER = "model.vqmodel.decoder."  # prefix of the tensors of a VQ decoder inside a Chameleon checkpoint
PROMPTS = "cls_embedding."  # prefix of the tensors that embed LlamaGen's prompts
STAGE_2_CODES = 1024  # codes per image of LlamaGen's stage 2


def is_chameleon(fields: Fields, shapes: Shapes, shared_norms: bool) -> bool:
    """Returns whether a checkpoint has the Chameleon layout. shared_norms: true if its heads share norms of
    queries, as in Lumina-mGPT; false if each has one, as in Anole."""
    norm, heads = shapes.get("model.layers.0.self_attn.q_norm.weight"), fields.get("num_attention_heads")
    if norm is None or not isinstance(heads, int) or "vocabulary_map" not in fields:
        return False
    return (norm[0] < heads) == shared_norms


def has_codec(shapes: Shapes) -> bool:
    """Returns whether a checkpoint holds a VQ decoder, so that no VQGAN has to lie beside it."""
    return any(name.startswith(VQ_DECODER) for name in shapes)


def is_stage(name: str, fields: Fields, shapes: Shapes) -> bool:
    """Returns whether a checkpoint is of the LlamaGen family of that name.

    Models of classes, and of image sizes that were not published, count as stage 1. A .pt file of a
    text-to-image model does not state its image size, so it is recognised as neither stage.
    """
    prompts = {key.removeprefix("model.") for key in shapes if key.removeprefix("model.").startswith(PROMPTS)}
    if not prompts:
        return False
    cells = fields.get("block_size")
    if f"{PROMPTS}embedding_table.weight" in prompts:
        return name == "llamagen"
    return cells is not None and (cells == STAGE_2_CODES) == (name == "llamagen2")


EMOJI = ModelFamily(
    name="emoji",
    about="the embedded model",
    layout="chameleon",
    recognises=lambda fields, shapes: is_chameleon(fields, shapes, False) and has_codec(shapes),
    home=CKPTS / "emoji",
    drafter="drafter",
    tree=EMBEDDED_TREE,
    fp32_on_cpu=True,
    reference=True,
    published=False,
)
ANOLE = ModelFamily(
    name="anole",
    about="Anole-7b",
    layout="chameleon",
    recognises=lambda fields, shapes: is_chameleon(fields, shapes, False) and not has_codec(shapes),
    home=CKPTS / "anole",
    target="Anole-7b-v0.1-hf",
    drafter="trained_drafters/anole_drafter",
    method="eagle-2",
    options=("tokenizer_base_path",),
    static_tree="naive_extend_57",
    reference=True,
)
LUMINA_MGPT = ModelFamily(
    name="lumina_mgpt",
    about="Lumina-mGPT-7B",
    layout="chameleon",
    recognises=lambda fields, shapes: is_chameleon(fields, shapes, True),
    home=CKPTS / "lumina_mgpt",
    target="Lumina-mGPT-7B-768",
    drafter="trained_drafters/LANTERN-Lumina-mGPT-7B-768",
    options=("tokenizer_base_path", "eagle_version"),
    default_size=768,
    tree=TreeShape(6, 10, 58),
)
LLAMAGEN = ModelFamily(
    name="llamagen",
    about="LlamaGen's stage 1, or a class-conditional LlamaGen",
    layout="llamagen",
    recognises=lambda fields, shapes: is_stage("llamagen", fields, shapes),
    home=CKPTS / "llamagen",
    target="LlamaGen-T2I",
    drafter="trained_drafters/llamagen_drafter",
    method="eagle-2",
    options=("vq_path", "text_encoder", "class_labels"),
    static_tree="naive_extend_57",
    embedded_prompts=True,
)
LLAMAGEN2 = replace(
    LLAMAGEN,
    name="llamagen2",
    about="LlamaGen's stage 2",
    recognises=lambda fields, shapes: is_stage("llamagen2", fields, shapes),
    target="LlamaGen-T2I-2",
    drafter="trained_drafters/llamagen2_drafter",
)
JANUS_PRO = ModelFamily(
    name="janus_pro",
    about="Janus-Pro-1B; 7B by --model_path",
    layout="janus",
    model_type="janus",
    home=CKPTS / "janus_pro",
    target="Janus-Pro-1B",
    hub="deepseek-community/Janus-Pro-1B",
    guidance=5.0,
    top_k=0,
)
EMU3 = ModelFamily(
    name="emu3",
    about="Emu3-Gen",
    layout="emu3",
    model_type="emu3",
    home=CKPTS / "emu3",
    target="Emu3-Gen-hf",
    hub="BAAI/Emu3-Gen-hf",
    options=("ratio",),
    default_size=720,
    top_k=2048,
)
GLM_IMAGE = ModelFamily(
    name="glm_image",
    about="GLM-Image's autoregressive stage",
    layout="glm_image",
    model_type="glm_image",
    home=CKPTS / "glm_image",
    target="GLM-Image",
    hub="zai-org/GLM-Image",
    parts=("vision_language_encoder", "processor"),
    options=("height", "width"),
    guidance=1.0,  # the model has no unconditional branch
    temperature=0.9,
    top_k=0,
    top_p=0.75,
    pixels=False,
)
SIMPLEAR = ModelFamily(
    name="simplear",
    about="SimpleAR-0.5B; 1.5B by --model_path",
    layout="simplear",
    model_type="qwen2",
    home=CKPTS / "simplear",
    target="SimpleAR-0.5B-RL",
    hub="Daniel0724/SimpleAR-0.5B-RL",
    options=("vq_path", "trust_torchscript"),
    default_size=1024,
    guidance=6.0,
    top_k=0,
)
LIQUID = ModelFamily(
    name="liquid",
    about="Liquid-7B",
    layout="liquid",
    model_type="gemma",
    home=CKPTS / "liquid",
    target="Liquid_V1_7B",
    hub="Junfeng5/Liquid_V1_7B",
    options=("tokenizer_base_path",),
    guidance=7.0,
    temperature=0.99,
    top_k=4096,
    top_p=0.96,
)
FAMILIES = (EMOJI, ANOLE, LUMINA_MGPT, LLAMAGEN, LLAMAGEN2, JANUS_PRO, EMU3, GLM_IMAGE, SIMPLEAR, LIQUID)
SPECS: dict[str, ModelFamily] = {spec.name: spec for spec in FAMILIES}
PUBLISHED = tuple(name for name, spec in SPECS.items() if spec.published)


def spec_of(name: str) -> ModelFamily:
    """Returns the family of that name. Raises CheckpointError if there is none."""
    if name not in SPECS:
        raise CheckpointError(f"there is no model {name}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
