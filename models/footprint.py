"""Computes the memory that a model needs to generate images, part by part, from its dimensions alone.

`parts` is the table of `main.py memory`. `check_room` compares what decoding will allocate with what the
device has free, before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from adt_tree.errors import CheckpointError, UserError
from adt_tree.method import Demand
from adt_tree.noise import ROWS
from models.cache import aligned
from models.checkpoint.meta_init import on_meta
from models.codecs.vq import VQConfig, VQModel
from models.drafter import DrafterNet, step_entries
from models.graphs import row_bucket
from models.registry import spec_of
from models.spec import CKPTS, DTYPE_NAMES
from models.transformer import MOST_TABULATED, Decoder, DecoderConfig

FP32, FP64, INT64 = 4, 8, 8
POOL = 4  # number of [images, nodes, codes] fp32 tensors in the scratch memory that CUDA graphs share
NOISE_PARTS = 3  # number of fp64 tensors that exist at once while noise is computed for ROWS positions
DEMAND = Demand()  # of the AR baseline
MAPS = 4  # number of the codec's feature maps that exist at once, each as large as the largest
LIBRARIES = 2**28  # bytes that cuBLAS and cuDNN allocate at their first use, or that fragmentation wastes


@dataclass(frozen=True, slots=True)
class Use:
    """The dimensions of a model, of its trees and of a batch, on which memory depends."""

    decoder: DecoderConfig
    drafter: DecoderConfig | None
    vq: VQConfig | None  # None: codes become pixels elsewhere
    codes: int  # in the codebook
    side: int  # pixels of one image
    tokens: int  # of one image, row ends included
    prompt: int  # tokens of the longest prompt
    nodes: int  # of the largest tree, the root included
    scratch: int  # entries of a step in the drafter's cache
    images: int  # in flight
    branches: int  # 2 under guidance
    element: int  # bytes of a weight, an activation or a cached number
    # Parameters of a codec that is not a VQModel, or of code vectors without a codec. None: the codec is a
    # VQModel, and `vq` tells its parameters.
    codec_parameters: int | None = None
    demand: Demand = DEMAND  # of the method
    graphs: bool = False  # the parts of a step are recorded as CUDA graphs


def published_use(
    name: str,
    precision: str = "bf16",
    images: int = 1,
    nodes: int | None = None,
    tokens: int | None = None,
) -> Use:
    """Returns the dimensions of a family as published, under guidance if it has any, with EAGLE-2's trees.

    nodes: of a tree, the root included; None: those of the family's tree. tokens: of an image, row ends
    included; None: those of the published size. CheckpointError for a family that the manifest lacks.
    """
    spec, file = spec_of(name), CKPTS / "manifest.json"
    shape = json.loads(file.read_text(encoding="utf-8"))["shapes"].get(name)
    if shape is None:
        raise CheckpointError(f"{name}: its dimensions are not under `shapes` in {file}; add them there")
    fields, vq = shape["vq"], None
    if "base_channels" in fields:
        vq = replace(VQConfig.from_hf(fields), frames=shape.get("frames", 1))
        codec_parameters = count(partial(spec.codec, fields)) if spec.codec else None
    else:  # code vectors alone
        codec_parameters = fields["num_embeddings"] * fields["embed_dim"]
    return Use(
        decoder=spec.decoder_config(shape["target"]),
        drafter=spec.decoder_config(shape["drafter"]) if shape["drafter"] else None,
        vq=vq,
        codes=fields["num_embeddings"],
        side=round(shape["side"] * (tokens / shape["image_tokens"]) ** 0.5) if tokens else shape["side"],
        tokens=tokens or shape["image_tokens"],
        prompt=shape["prompt"],
        nodes=nodes or spec.tree.num_nodes,
        scratch=step_entries(spec.tree.depth, spec.tree.width),
        images=images,
        branches=1 if spec.guidance == 1 else 2,
        element=getattr(torch, DTYPE_NAMES[precision]).itemsize,
        codec_parameters=codec_parameters,
    )


def decoding_parts(use: Use) -> dict[str, int]:
    """Returns the bytes that decoding allocates in a loaded model, by part.

    The last two, `pass` (a step) and `pixels` (the decoding of an image's pixels), do not exist at the same
    time. Caches are exact, the rest are estimates.
    """
    config, codes, drafter = use.decoder, use.codes, 0
    slots = use.prompt + use.tokens + use.nodes
    tables = _rotations(config, slots) + use.demand.neighbours * codes * INT64
    if use.drafter is not None:
        drafter = _cache(use.drafter, use, use.prompt + use.tokens + use.scratch)
        tables += _rotations(use.drafter, slots)
    return {
        "cache": _cache(config, use, slots),
        "drafter cache": drafter,
        "tables": tables,
        "noise": use.images * use.tokens * codes * FP32 if use.demand.noise else 0,
        "pass": _step(use),
        "pixels": _pixels(use),
    }


def _step(use: Use) -> int:
    """Returns the bytes that a step allocates at most, including the memory that CUDA graphs hold.

    A step needs most either while the target scores, for a layer's activations, or while drafts are verified,
    for distributions over the codes. Graphs share one pool of scratch memory, as large as the greatest
    recording needs. The results of each function have fixed memory outside the pool.
    """
    demand, distribution = use.demand, use.images * use.nodes * use.codes * FP32
    nodes = row_bucket(use.nodes) if use.graphs else use.nodes
    rows = max(use.images * use.branches * nodes, use.prompt)  # prompts are taken in one by one
    layer = rows * _row(use) * use.element
    if use.graphs:
        step = max(layer, POOL * distribution) + (demand.distributions - 1) * distribution
    else:  # while the target scores, logits, log p and noise of the step before are still there
        step = max(layer + (use.branches + 2) * distribution, demand.distributions * distribution)
    return max(step, NOISE_PARTS * ROWS * use.codes * FP64 if demand.noise else 0)


def _row(use: Use) -> int:
    """Returns the number of values per row that exist at once in a layer, its row of the mask included.

    The factors count tensors that are alive together; tests/test_launches.py compares the sum with the memory
    that each operator of a layer takes.
    """
    config = use.decoder
    width, kv_width = config.hidden_size, config.num_kv_heads * config.head_dim
    fused, rotated = width + 2 * kv_width, width + kv_width
    attention = fused + 6 * rotated  # queries and keys are rotated in fp32
    if config.qk_norm:
        attention += fused + rotated
    mask = config.num_heads // config.num_kv_heads * (use.prompt + use.tokens + use.nodes)
    return 5 * width + max(attention, 4 * config.intermediate_size) + mask


def _pixels(use: Use) -> int:
    """Returns the bytes of feature maps while one image is decoded; 0 where codes become pixels elsewhere."""
    if use.vq is None:
        return 0
    widest = max(
        use.vq.base_channels * factor * (use.side >> level) ** 2
        for level, factor in enumerate(use.vq.channel_multiplier)
    )
    return MAPS * widest * use.vq.frames * FP32


def parts(use: Use) -> dict[str, int]:
    """Returns bytes by part, and their `peak`: what exists all the time, and the larger of a pass and pixels.

    Weights and caches are exact on a GPU, the rest are estimates. LlamaGen's text encoder is left out: it is
    freed before decoding begins. Loading also needs room for one tensor and the head's rows that score no
    code. On a CPU that packs weights (models.packed), caches are fp32 whatever `element` says, and oneDNN
    compiles and stores some 0.6 MB for every product and number of rows.
    """
    config, codes, drafter, vq = use.decoder, use.codes, use.drafter, use.vq
    weights = {
        "target": count(lambda: _decoder(config, codes)) * use.element,
        "drafter": 0 if drafter is None else count(lambda: DrafterNet(drafter)) * use.element,
        "codec": (use.codec_parameters or (count(lambda: VQModel(vq)) if vq else 0)) * FP32,
    }
    decoding = decoding_parts(use)
    return {**weights, **decoding, "peak": sum(weights.values()) + decoding_peak(use)}


def decoding_peak(use: Use) -> int:
    """Returns the bytes that decoding allocates in a loaded model at its worst moment."""
    *lasting, one_pass, pixels = decoding_parts(use).values()
    return sum(lasting) + max(one_pass, pixels)


def count(make: Callable[[], nn.Module]) -> int:
    """Returns the number of parameters of the module that make() builds, without building it."""
    return sum(parameter.numel() for parameter in on_meta(make).parameters())


def _decoder(config: DecoderConfig, num_codes: int) -> Decoder:
    """Returns a decoder as a loaded model has it, whose head scores codes alone. Which rows they are does not
    matter here."""
    decoder = Decoder(config)
    decoder.cut_head(0, num_codes)
    return decoder


def _cache(config: DecoderConfig, use: Use, slots: int) -> int:
    rows, entry = use.images * use.branches, 2 * config.num_kv_heads * aligned(config.head_dim)
    return config.num_layers * rows * slots * entry * use.element


def _rotations(config: DecoderConfig, slots: int) -> int:
    """Returns the bytes of transformer.rotary_table(): a 2 x 2 matrix for every pair of a head's numbers."""
    positions = max(min(config.max_positions, MOST_TABULATED), slots)
    return positions * config.head_dim // 2 * 4 * FP32


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a device; None if the system does not tell."""
    if device.type == "cuda":
        # torch keeps blocks that it has freed, and uses them again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused - LIBRARIES
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_room(use: Use, device: torch.device, precision: str) -> None:
    """Raises UserError if decoding needs more memory than the device has free. The message names the largest
    batch size that fits, or what else to change if a single image does not."""
    free, needed = free_bytes(device), decoding_peak(use)
    if free is None or needed <= free:
        return
    sizes = range(use.images - 1, 0, -1)
    fits = next((images for images in sizes if decoding_peak(replace(use, images=images)) <= free), 0)
    advice = f"the largest that fits is --batch_size {fits}"
    if not fits:
        lower = "give --precision bf16, or" if precision == "fp32" else f"--precision is {precision} already:"
        advice = f"{lower} free memory on the device or use a larger one"
    raise UserError(
        f"--batch_size {use.images}: decoding needs {needed / 1e9:.2f} GB beside the loaded model, and "
        f"{device} has {max(free, 0) / 1e9:.2f} GB free; {advice}"
    )
