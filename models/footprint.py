"""Computes the memory that a model needs to generate images, part by part, from its dimensions alone.

`parts` is the table of `main.py memory`. `check_room` compares what decoding will allocate with what the
device has free, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path

import torch
from torch import nn

from adt_tree.errors import CheckpointError, NoRoom
from adt_tree.noise_table import BLOCK
from adt_tree.padding import Padding
from models.checkpoint.stored_module import on_meta
from models.codecs.vq import VQConfig, VQModel
from models.decoder.cache import aligned
from models.decoder.config import DecoderConfig
from models.decoder.transformer import Block, Decoder, make_head
from models.drafter import DrafterNet
from models.family import DTYPE_NAMES
from models.registry import spec_of

FP32 = 4
# Number of [images, nodes, codes] fp32 tensors that a pass is allowed. Rejection over a static tree holds 15
# at once; other rules hold about half, and a layer's activations take less than the rest.
PASS_TENSORS = 15
MAX_RECORDINGS = 40  # CUDA graphs of one target; tests/models/test_buckets.py counts them
RECORDING_BYTES = 10 * 2**20  # of one CUDA graph
FEATURE_MAPS = 4  # number of the codec's feature maps that exist at once, each as large as the largest
LIBRARIES = 2**28  # bytes that cuBLAS and cuDNN allocate at their first use, or that fragmentation wastes


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model, of its trees and of a batch, on which memory depends."""

    decoder: DecoderConfig
    drafter: DecoderConfig | None
    vq: VQConfig | None  # None: codes become pixels elsewhere
    codes: int  # in the codebook
    side: int  # pixels of one image
    tokens: int  # of one image, row ends included
    prompt: int  # tokens of the longest prompt
    nodes: int  # of the largest tree, the root included
    images: int  # in flight
    branches: int  # 2 under guidance
    element: int  # bytes of a weight, an activation or a cached number
    # Parameters of a codec that is not a VQModel, or of code vectors without a codec. None: the codec is a
    # VQModel, and `vq` tells its parameters.
    codec_parameters: int | None = None
    noise: bool = True  # images are sampled, so that the noise of their next codes is stored
    graphs: bool = False  # the parts of a step are recorded as CUDA graphs
    libraries: int = 0  # bytes that cuBLAS and cuDNN take on a GPU

    @property
    def columns(self) -> int:
        """Codes in a row of an image of one square raster, which has no row ends if there is no VQModel."""
        return self.side // self.vq.patch_size if self.vq else isqrt(self.tokens)


def published_dimensions(
    name: str,
    precision: str = "bf16",
    images: int = 1,
    nodes: int | None = None,
    tokens: int | None = None,
) -> Dimensions:
    """Returns the dimensions of a family as published, under guidance if it has any, with EAGLE-2's trees.

    nodes: of a tree, the root included; None: those of the family's tree. tokens: of an image, row ends
    included; None: those of the published size. CheckpointError for a family whose row of the registry has no
    networks.
    """
    spec = spec_of(name)
    published = spec.networks
    if published is None:
        raise CheckpointError(f"{name}: its row of models/registry.py has no networks; add them there")
    tree = spec.default_tree("eagle-2")
    assert tree is not None
    fields, vq, decoder = published.vq, None, spec.reader.decoder_config(published.target)
    if "base_channels" in fields:
        vq = replace(VQConfig.from_hf(fields), frames=published.frames)
        other = getattr(spec.reader, "vqvae", None)  # makes a codec that is not a VQModel
        codec_parameters = count(partial(other, fields)) if other else None
    else:  # code vectors alone
        codec_parameters = fields["num_embeddings"] * fields["embed_dim"]
    return Dimensions(
        decoder=decoder,
        drafter=replace(decoder, num_layers=1) if spec.drafter else None,  # a layer of the target's size
        vq=vq,
        codes=fields["num_embeddings"],
        side=round(published.side * (tokens / published.image_tokens) ** 0.5) if tokens else published.side,
        tokens=tokens or published.image_tokens,
        prompt=published.prompt,
        nodes=nodes or tree.largest.num_nodes,
        images=images,
        branches=1 if spec.guidance == 1 else 2,
        element=getattr(torch, DTYPE_NAMES[precision]).itemsize,
        codec_parameters=codec_parameters,
    )


def parts(dims: Dimensions) -> dict[str, int]:
    """Returns bytes by part, and their `peak`: what exists all the time, and the larger of a pass and pixels.

    Weights are exact, and so is the target's cache on a GPU; the rest is estimated. What libraries take on a
    GPU counts only where `libraries` says so: on an H200 it was up to 180 MB of LIBRARIES. LlamaGen's text
    encoder is left out: it is freed before decoding begins. Loading also needs room for one tensor and the
    head's rows that score no code. On a CPU that packs weights (`packed`), caches are fp32 whatever `element`
    says, and oneDNN compiles and stores some 0.6 MB for every product and number of rows.
    """
    drafter, vq = dims.drafter, dims.vq
    config = replace(dims.decoder, head_rows=dims.codes)  # loading cuts the head to the codes
    codec = dims.codec_parameters or (count(lambda: VQModel(vq)) if vq else 0)
    weights = {
        "target": count(lambda: Decoder(config)) * dims.element,
        "drafter": 0 if drafter is None else count(lambda: DrafterNet(drafter)) * dims.element,
        "codec": codec * FP32,
    }
    return {**weights, **decoding_parts(dims), "peak": sum(weights.values()) + decoding_peak(dims)}


def weights_read(config: DecoderConfig, codes: int) -> int:
    """Returns the number of weights that a pass of the target reads: its layers and its head over the codes.
    Of the embedding it reads only a few rows."""
    head = count(lambda: make_head(replace(config, head_rows=codes)))
    return config.num_layers * count(lambda: Block(config)) + head


def drafter_share(dims: Dimensions) -> float:
    """Returns the bytes that a pass of the drafter reads, the target's head included, over those of a pass of
    the target. The model must have a drafter."""
    drafter, codes = dims.drafter, dims.codes
    assert drafter is not None
    head = weights_read(replace(dims.decoder, num_layers=0), codes)
    layer = count(lambda: DrafterNet(drafter)) - drafter.vocab_size * drafter.hidden_size
    return (layer + head) / weights_read(dims.decoder, codes)


def decoding_parts(dims: Dimensions) -> dict[str, int]:
    """Returns the bytes that decoding allocates in a loaded model, by part.

    The last two, `pass` (a step) and `pixels` (the decoding of an image's pixels), do not exist at the same
    time.
    """
    codes, nodes = dims.codes, Padding(dims.graphs).nodes(dims.nodes)
    recordings = MAX_RECORDINGS * RECORDING_BYTES if dims.graphs else 0
    return {
        "cache": _cache(dims.decoder, dims) + (_cache(dims.drafter, dims) if dims.drafter else 0),
        "noise": dims.images * (dims.nodes + BLOCK) * codes * FP32 if dims.noise else 0,
        "pass": PASS_TENSORS * dims.images * nodes * codes * FP32 + recordings,
        "pixels": _pixels(dims),
    }


def decoding_peak(dims: Dimensions) -> int:
    """Returns the bytes that decoding allocates in a loaded model at its worst moment."""
    cache, noise, one_pass, pixels = decoding_parts(dims).values()
    return cache + noise + max(one_pass, pixels) + dims.libraries


def _cache(config: DecoderConfig, dims: Dimensions) -> int:
    """Returns the bytes of the keys and values of a decoder or a drafter."""
    entries = dims.images * dims.branches * (dims.prompt + dims.tokens + dims.nodes)
    size = 2 * config.num_kv_heads * aligned(config.head_dim)
    return config.num_layers * entries * size * dims.element


def _pixels(dims: Dimensions) -> int:
    """Returns the bytes of feature maps while one image is decoded; 0 where codes become pixels elsewhere."""
    if dims.vq is None:
        return 0
    widest = max(
        dims.vq.base_channels * factor * (dims.side >> level) ** 2
        for level, factor in enumerate(dims.vq.channel_multiplier)
    )
    return FEATURE_MAPS * widest * dims.vq.frames * FP32


def count(make: Callable[[], nn.Module]) -> int:
    """Returns the number of parameters of the module that make() builds, without building it."""
    return sum(parameter.numel() for parameter in on_meta(make).parameters())


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a device; None if the system does not tell."""
    if device.type == "cuda":
        # torch keeps blocks that it has freed, and uses them again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_room(dims: Dimensions, device: torch.device, precision: str) -> None:
    """Raises NoRoom if decoding needs more memory than the device has free. The message names the largest
    batch size that fits, or what else to change if a single image does not."""
    free, needed = free_bytes(device), decoding_peak(dims)
    if free is None or needed <= free:
        return
    sizes = range(dims.images - 1, 0, -1)
    fits = next((images for images in sizes if decoding_peak(replace(dims, images=images)) <= free), 0)
    advice = f"the largest that fits is batch_size {fits}"
    if not fits:
        lower = "give precision bf16, or" if precision == "fp32" else f"precision is {precision} already:"
        advice = f"{lower} free memory on the device or use a larger one"
    raise NoRoom(
        f"batch_size {dims.images}: decoding needs {needed / 1e9:.2f} GB beside the loaded model, and "
        f"{device} has {max(free, 0) / 1e9:.2f} GB free; {advice}"
    )
