"""What a model needs in memory while it draws, part by part, from configurations alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from adt_tree.errors import CheckpointError
from models.checkpoint.meta_init import on_meta
from models.codecs.vq import VQConfig, VQModel
from models.drafter import DrafterNet
from models.model import DTYPES
from models.registry import spec_of
from models.spec import CKPTS
from models.transformer import Decoder, DecoderConfig

FP32 = 4
DISTRIBUTIONS = 6  # [images, nodes, codes] fp32 tensors at once: logits, guided, filtered, noise, choice
MAPS = 4  # pixel-sized feature maps of the codec alive at once


@dataclass(frozen=True, slots=True)
class Use:
    """A model and how it is used."""

    decoder: DecoderConfig
    drafter: DecoderConfig | None
    vq: VQConfig
    side: int  # pixels of one image
    tokens: int  # of one image, row ends included
    prompt: int  # tokens of the longest prompt
    nodes: int  # of the largest tree, the root included
    scratch: int  # entries of a tree in the drafter's cache
    images: int  # in flight
    branches: int  # 2 under guidance
    element: int  # bytes of a weight or activation
    codec: int | None = None  # numbers in a codec of another kind: `vq` then gives codes and widths alone
    frames: int = 1  # that the codec decodes for one image


def published_use(name: str, precision: str = "bf16", images: int = 1, nodes: int | None = None) -> Use:
    """A family as it was published, guided, with EAGLE-2's trees. nodes: of a tree, the root included.
    CheckpointError if nobody published it."""
    spec = spec_of(name)
    if not spec.published:
        raise CheckpointError(f"{name}: its dimensions are not in ckpts/manifest.json")
    shape = json.loads((CKPTS / "manifest.json").read_text(encoding="utf-8"))["shapes"][name]
    return Use(
        decoder=spec.decoder_config(shape["target"]),
        drafter=spec.decoder_config(shape["drafter"]) if shape["drafter"] else None,
        vq=VQConfig.from_hf(shape["vq"]),
        side=shape["side"],
        tokens=shape["image_tokens"],
        prompt=shape["prompt"],
        nodes=nodes or spec.tree.budget + 1,
        scratch=max(spec.tree.depth + 1, spec.tree.depth * spec.tree.width),
        images=images,
        branches=2,
        element=DTYPES[precision].itemsize,
        codec=count(partial(spec.codec, shape["vq"])) if spec.codec else None,
        frames=shape.get("frames", 1),
    )


def parts(use: Use) -> dict[str, int]:
    """Bytes by part; `peak` is what lives on and the larger of a target pass and a decoding of pixels.

    Weights and caches are exact on a GPU, the others estimates; temperature 0 has no noise. The text encoder
    of LlamaGen is not in it: it is given back before decoding begins. While loading, one tensor and the
    rows of the head that score no code come on top; where weights are packed (models.packed), caches are fp32
    whatever `element` says, and oneDNN compiles and keeps some 0.6 MB per product and number of rows met.
    """
    config, codes = use.decoder, use.vq.num_embeddings
    found = {
        "target": count(lambda: _decoder(config, codes)) * use.element,
        "drafter": 0,
        "codec": (use.codec or count(lambda: VQModel(use.vq))) * FP32,
        "cache": _cache(config, use, use.prompt + use.tokens + use.nodes),
        "drafter cache": 0,
        "noise": use.images * use.tokens * codes * FP32,
    }
    if use.drafter is not None:
        small = use.drafter
        found["drafter"] = count(lambda: DrafterNet(small)) * use.element
        found["drafter cache"] = _cache(small, use, use.prompt + use.tokens + use.scratch)
    living = sum(found.values())
    width = 6 * config.hidden_size + 4 * config.intermediate_size
    found["pass"] = use.images * use.branches * use.nodes * width * use.element
    found["pass"] += use.images * use.nodes * codes * FP32 * (DISTRIBUTIONS + use.branches)
    widest = max(
        use.vq.base_channels * factor * (use.side >> level) ** 2
        for level, factor in enumerate(use.vq.channel_multiplier)
    )
    found["pixels"] = MAPS * widest * use.frames * FP32
    return {**found, "peak": living + max(found["pass"], found["pixels"])}


def count(make: Callable[[], nn.Module]) -> int:
    """Parameters of the module that make builds, without building it."""
    return sum(parameter.numel() for parameter in on_meta(make).parameters())


def _decoder(config: DecoderConfig, num_codes: int) -> Decoder:
    """A decoder as a loaded model has it: which rows of the head the codes have does not matter here."""
    decoder = Decoder(config)
    decoder.cut_head(0, num_codes)
    return decoder


def _cache(config: DecoderConfig, use: Use, slots: int) -> int:
    rows, entry = use.images * use.branches, 2 * config.num_kv_heads * config.head_dim
    return config.num_layers * rows * slots * entry * use.element
