"""The table of model families. A new family is one ModelFamily here and, unless another family has the same
layout, a reader of its files in models/layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adt_tree.errors import CheckpointError
from adt_tree.method import RELEASED_ADAPTIVE
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.settings import Lantern
from adt_tree.static_trees import StaticTree
from models.family import Fields, ModelFamily, Shapes
from models.published import CKPTS, Networks, Source

VQ_DECODER = "model.vqmodel.decoder."  # prefix of the tensors of a VQ decoder inside a Chameleon checkpoint
PROMPTS = "cls_embedding."  # prefix of the tensors that embed LlamaGen's prompts
STAGE_2_CODES = 1024  # codes per image of LlamaGen's stage 2


def is_chameleon(fields: Fields, shapes: Shapes, shared_norms: bool = False, codec: bool = False) -> bool:
    """Returns whether a checkpoint has the Chameleon layout. shared_norms: true if its heads share norms of
    queries, as in Lumina-mGPT; false if each has one, as in Anole. codec: true if a VQ decoder lies in it, as
    in the embedded model."""
    norm, heads = shapes.get("model.layers.0.self_attn.q_norm.weight"), fields.get("num_attention_heads")
    if norm is None or not isinstance(heads, int) or "vocabulary_map" not in fields:
        return False
    has_codec = any(name.startswith(VQ_DECODER) for name in shapes)
    return (norm[0] < heads) == shared_norms and has_codec == codec


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


META_LICENCE = "Chameleon Research License"
META_FORM = "https://github.com/facebookresearch/chameleon"
META_FILES = ("text_tokenizer.json", "vqgan.yaml", "vqgan.ckpt")
LLAMAGEN_T5 = Source(
    "text encoder", "google/flan-t5-xl", "llamagen/t5/flan-t5-xl", licence="Apache-2.0",
    files=("*.json", "*.safetensors", "spiece.model"),
)  # fmt: skip
LLAMAGEN_VQ = Source(
    "VQ decoder", "peizesun/llamagen_t2i", "llamagen", files=("vq_ds16_t2i.pt",), licence="MIT"
)
LLAMAGEN_C2I = (  # files of class-conditional models, which the family llamagen reads
    Source(
        "target, class to image", "FoundationVision/LlamaGen", "llamagen", licence="MIT",
        choices=(
            "c2i_XL_384.pt", "c2i_B_256.pt", "c2i_B_384.pt", "c2i_L_256.pt", "c2i_L_384.pt",
            "c2i_XXL_384.pt", "c2i_3B_384.pt",
        ),
    ),
    Source(
        "VQ decoder", "FoundationVision/LlamaGen", "llamagen", files=("vq_ds16_c2i.pt",), licence="MIT"
    ),
)  # fmt: skip

LLAMA_7B = {
    "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}  # fmt: skip
LLAMAGEN_XL = {
    "vocab_size": 16384, "hidden_size": 1280, "intermediate_size": 3584, "num_hidden_layers": 36,
    "num_attention_heads": 20, "rms_norm_eps": 1e-5, "cls_token_num": 120, "block_size": 256,
}  # fmt: skip
META_VQ = {
    "base_channels": 128, "channel_multiplier": [1, 1, 2, 2, 4], "num_res_blocks": 2, "embed_dim": 256,
    "latent_channels": 256, "num_embeddings": 8192, "resolution": 512,
}  # fmt: skip
LLAMAGEN_VQ_16 = META_VQ | {
    "embed_dim": 8, "num_embeddings": 16384, "resolution": 256, "attn_resolutions": [16]
}  # fmt: skip

EMOJI = ModelFamily(
    name="emoji",
    about="the embedded model",
    layout="chameleon",
    recognises=partial(is_chameleon, codec=True),
    home=CKPTS / "emoji",
    # Smaller ones: in a small model each node adds more to the time of a pass.
    trees=(TreeShape(5, 4, 10), AdaptiveTree()),
    lantern=Lantern(delta=0.5, max_k=100),  # under the published settings images often stay the same
    fp32_on_cpu=True,
    reference=True,
)
ANOLE = ModelFamily(
    name="anole",
    about="Anole-7b",
    layout="chameleon",
    recognises=is_chameleon,
    home=CKPTS / "anole",
    target=Source(
        "target, text tokenizer", "leloy/Anole-7b-v0.1-hf", "anole/Anole-7b-v0.1-hf", size="14.3 GB",
        licence="Apache-2.0 by its card; derived from Chameleon",
    ),
    drafter=Source("drafter", "jadohu/anole_drafter", "anole/trained_drafters/anole_drafter"),
    beside=(
        Source("VQGAN", "", "anole/chameleon/tokenizer", META_FILES, licence=META_LICENCE, form=META_FORM),
    ),
    networks=Networks(LLAMA_7B, META_VQ, image_tokens=1024, prompt=64, side=512),
    method="eagle-2",
    options=("tokenizer_base_path",),
    trees=(StaticTree("naive_extend_57"),),
    reference=True,
)  # fmt: skip
LUMINA_MGPT = ModelFamily(
    name="lumina_mgpt",
    about="Lumina-mGPT-7B",
    layout="chameleon",
    recognises=partial(is_chameleon, shared_norms=True),
    home=CKPTS / "lumina_mgpt",
    target=Source(
        "target", "Alpha-VLLM/Lumina-mGPT-7B-768", "lumina_mgpt/Lumina-mGPT-7B-768",
        licence="derived from Chameleon", also="`-512`, `-1024`",
    ),
    drafter=Source(
        "drafter", "sihwanpark/LANTERN-Lumina-mGPT-7B-768",
        "lumina_mgpt/trained_drafters/LANTERN-Lumina-mGPT-7B-768", size="2.02 GB", licence="Apache-2.0",
    ),
    beside=(
        Source(
            "VQGAN, text tokenizer", "", "lumina_mgpt/chameleon/tokenizer", META_FILES,
            licence=META_LICENCE, form=META_FORM,
        ),
    ),
    networks=Networks(LLAMA_7B, META_VQ, image_tokens=2352, prompt=96, side=768),
    options=("tokenizer_base_path", "eagle_version", "cfg_mode"),
    default_size=768,
    trees=(TreeShape(6, 10, 58), replace(RELEASED_ADAPTIVE, depth_start=6)),
)  # fmt: skip
LLAMAGEN = ModelFamily(
    name="llamagen",
    about="LlamaGen's stage 1, or a class-conditional LlamaGen",
    layout="llamagen",
    recognises=partial(is_stage, "llamagen"),
    home=CKPTS / "llamagen",
    target=Source(
        "target, 256 px", "jadohu/LlamaGen-T2I", "llamagen/LlamaGen-T2I", licence="LlamaGen: MIT",
        also="`peizesun/llamagen_t2i/t2i_XL_stage1_256.pt`",
    ),
    drafter=Source("drafter", "jadohu/llamagen_drafter", "llamagen/trained_drafters/llamagen_drafter"),
    beside=(LLAMAGEN_VQ, LLAMAGEN_T5),
    networks=Networks(LLAMAGEN_XL, LLAMAGEN_VQ_16, image_tokens=256, prompt=120, side=256),
    method="eagle-2",
    options=("vq_path", "text_encoder", "class_labels"),
    trees=(StaticTree("naive_extend_57"),),
    embedded_prompts=True,
)  # fmt: skip
LLAMAGEN2 = replace(
    LLAMAGEN,
    name="llamagen2",
    about="LlamaGen's stage 2",
    recognises=partial(is_stage, "llamagen2"),
    target=Source(
        "target, 512 px", "jadohu/LlamaGen-T2I-2", "llamagen/LlamaGen-T2I-2", licence="LlamaGen: MIT",
        also="`peizesun/llamagen_t2i/t2i_XL_stage2_512.pt`",
    ),
    drafter=Source("drafter", "jadohu/llamagen2_drafter", "llamagen/trained_drafters/llamagen2_drafter"),
    networks=Networks(
        LLAMAGEN_XL | {"block_size": 1024}, LLAMAGEN_VQ_16, image_tokens=1024, prompt=120, side=512
    ),
)  # fmt: skip
JANUS_PRO = ModelFamily(
    name="janus_pro",
    about="Janus-Pro-1B; 7B by --model_path",
    layout="janus",
    model_type="janus",
    home=CKPTS / "janus_pro",
    target=Source(
        "everything", "deepseek-community/Janus-Pro-1B", "janus_pro/Janus-Pro-1B", size="about 4 GB",
        licence="code MIT, weights DeepSeek Model License", also="`Janus-Pro-7B`",
    ),
    networks=Networks(
        target={
            "text_config": {
                "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 5632,
                "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
                "max_position_embeddings": 16384,
            },
            "vq_config": {
                "projection_dim": 2048, "image_token_embed_dim": 2048, "num_embeddings": 16384
            },
        },
        vq=LLAMAGEN_VQ_16 | {"resolution": 384, "attn_resolutions": [24]},
        image_tokens=576, prompt=64, side=384,
    ),
    guidance=5.0,
    top_k=0,
)  # fmt: skip
EMU3 = ModelFamily(
    name="emu3",
    about="Emu3-Gen",
    layout="emu3",
    model_type="emu3",
    home=CKPTS / "emu3",
    target=Source(
        "everything", "BAAI/Emu3-Gen-hf", "emu3/Emu3-Gen-hf", licence="Apache-2.0 by its card"
    ),
    networks=Networks(
        target={},  # those of models.layouts.emu3
        vq={
            "base_channels": 256, "channel_multiplier": [1, 2, 2, 4], "num_res_blocks": 2, "embed_dim": 4,
            "latent_channels": 4, "num_embeddings": 32768, "resolution": 720,
        },
        image_tokens=8190, prompt=96, side=720, frames=4,
    ),
    options=("ratio",),
    default_size=720,
    top_k=2048,
)  # fmt: skip
GLM_IMAGE = ModelFamily(
    name="glm_image",
    about="GLM-Image's autoregressive stage",
    layout="glm_image",
    model_type="glm_image",
    home=CKPTS / "glm_image",
    target=Source(
        "codes, tokenizer", "zai-org/GLM-Image", "glm_image/GLM-Image", licence="MIT",
        files=("vision_language_encoder/*", "processor/*"),
    ),
    beside=(
        Source(
            "pixels: all else", "zai-org/GLM-Image", "glm_image/GLM-Image", licence="MIT", optional=True
        ),
    ),
    networks=Networks(
        target={
            "text_config": {
                "vocab_size": 168064, "hidden_size": 4096, "intermediate_size": 13696,
                "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
                "max_position_embeddings": 131072, "vision_vocab_size": 16512, "attention_bias": True,
                "rope_parameters": {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5},
            },
            "vq_config": {"num_embeddings": 16384},
            "image_start_token_id": 16384, "image_end_token_id": 16385,
        },
        vq={"num_embeddings": 16384, "embed_dim": 2048},
        image_tokens=1280, prompt=200, side=1024,
    ),
    options=("height", "width"),
    guidance=1.0,  # the model has no unconditional branch
    temperature=0.9,
    top_k=0,
    top_p=0.75,
    pixels=False,
)  # fmt: skip
SIMPLEAR = ModelFamily(
    name="simplear",
    about="SimpleAR-0.5B; 1.5B by --model_path",
    layout="simplear",
    model_type="qwen2",
    home=CKPTS / "simplear",
    target=Source(
        "codes, tokenizer", "Daniel0724/SimpleAR-0.5B-RL", "simplear/SimpleAR-0.5B-RL",
        licence="MIT by its repository", also="`-0.5B-SFT`, `-1.5B-SFT`, `-1.5B-RL`",
    ),
    beside=(
        Source(
            "pixels", "nvidia/Cosmos-1.0-Tokenizer-DV8x16x16", "simplear/Cosmos-1.0-Tokenizer-DV8x16x16",
            files=("decoder.jit",), licence="NVIDIA Open Model License", optional=True,
        ),
    ),
    networks=Networks(
        target={
            "vocab_size": 215672, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6,
            "max_position_embeddings": 32768,
        },
        vq={"num_embeddings": 64000, "embed_dim": 6},
        image_tokens=4096, prompt=96, side=1024,
    ),
    options=("vq_path", "trust_torchscript"),
    default_size=1024,
    guidance=6.0,
    top_k=0,
)  # fmt: skip
LIQUID = ModelFamily(
    name="liquid",
    about="Liquid-7B",
    layout="liquid",
    model_type="gemma",
    home=CKPTS / "liquid",
    target=Source(
        "target, tokenizer", "Junfeng5/Liquid_V1_7B", "liquid/Liquid_V1_7B",
        licence="MIT by its repository; derived from Gemma",
    ),
    beside=(
        Source(
            "VQGAN", "Junfeng5/Liquid_demo", "liquid", space=True, licence=META_LICENCE,
            files=("chameleon/vqgan.yaml", "chameleon/vqgan.ckpt"),
        ),
    ),
    networks=Networks(
        target={"vocab_size": 264192},  # the others are in models.layouts.liquid
        vq=META_VQ,
        image_tokens=1024, prompt=64, side=512,
    ),
    options=("tokenizer_base_path",),
    guidance=7.0,
    temperature=0.99,
    top_k=4096,
    top_p=0.96,
)  # fmt: skip
FAMILIES = (EMOJI, ANOLE, LUMINA_MGPT, LLAMAGEN, LLAMAGEN2, JANUS_PRO, EMU3, GLM_IMAGE, SIMPLEAR, LIQUID)
SPECS: dict[str, ModelFamily] = {spec.name: spec for spec in FAMILIES}
PUBLISHED = tuple(name for name, spec in SPECS.items() if spec.networks is not None)
# What get_ckpts fetches, by the name that it takes.
SOURCES = {spec.name: spec.sources for spec in FAMILIES if spec.sources} | {"llamagen_c2i": LLAMAGEN_C2I}


def spec_of(name: str) -> ModelFamily:
    """Returns the family of that name. Raises CheckpointError if there is none."""
    if name not in SPECS:
        raise CheckpointError(f"there is no model {name}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
