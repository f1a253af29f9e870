"""Loads checkpoints of the Chameleon layout: Anole, the embedded model and Lumina-mGPT.

Anole and the embedded model write images of one size as a raster of codes. Lumina-mGPT writes square images
of several sizes: tokens before the image say its size, and a token ends every row.

Token ids come from vocabulary_map in config.json. The text tokenizer and the VQGAN lie inside or beside the
checkpoint. The layout follows transformers' ChameleonForConditionalGeneration and the released code of
Alpha-VLLM/Lumina-mGPT and jadohu/LANTERN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.checkpoint.config import control_tokens, read_tokenizer
from models.checkpoint.files import reading
from models.checkpoint.stored_module import load_module
from models.checkpoint.weights import Weights, read_weights
from models.codecs.vq import VQConfig, VQModel
from models.decoder.config import DecoderConfig, read_shape
from models.drafter import DrafterLayout
from models.family import Checkpoint
from models.llama_names import decoder_names, tied
from models.model import Model, load_networks
from models.target import Prompt, PromptEncoder

BEGIN_OF_IMAGE = "<racm3:break>"
SEPARATOR = "<reserved08706>"  # ends the user's turn
VQ = "model.vqmodel."
# Tokens and instruction of Lumina-mGPT.
ROW_END = "<reserved08799>"
SIZES = 8800  # <reserved0NNNN>, where NNNN = SIZES + n, means n pairs of cells along a side
INSTRUCTION = "Generate an image of {size}x{size} according to the following prompt:\n"


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json of a target or a drafter. KeyError or ValueError names what is missing or wrong."""
    return replace(read_shape(config), qk_norm=True)


CHAMELEON = DrafterLayout(decoder_config)


def search_folders(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Returns the folders to search for text_tokenizer.json, vqgan.ckpt and vqgan.yaml: those below
    tokenizer_base_path if that option is set, otherwise the target's and those of the published layout, or
    of the copy that Liquid's authors publish."""
    inner = Path("chameleon", "tokenizer")
    base, target = checkpoint.options.tokenizer_base_path, checkpoint.folder
    if base is not None:
        return Path(base), Path(base) / inner
    home = checkpoint.spec.home
    return target, target.parent / inner, home / inner, home / inner.parent


def load(checkpoint: Checkpoint) -> Model:
    """Returns the model of a checkpoint. CheckpointError names what is missing or does not fit."""
    folder, lumina = checkpoint.folder, checkpoint.spec.name == "lumina_mgpt"
    (config, state), loaded = checkpoint.read(), checkpoint.loaded
    tokenizer = loaded.tokenizer if loaded else read_tokenizer(*search_folders(checkpoint))
    with reading(folder / "config.json"):
        ids, shape = config["vocabulary_map"], decoder_config(config)
        codes = sorted(index for name, index in ids.items() if name.startswith("IMGIMG"))
        cells = CellIds(range(codes[0], codes[-1] + 1))
        begin_of_text, begin, separator = (ids[name] for name in ("<s>", BEGIN_OF_IMAGE, SEPARATOR))
    # A checkpoint of the wrong family loads and runs, but generates noise: Lumina-mGPT stores one query norm
    # for several heads, Anole one for every head.
    with reading(folder):
        norms = state.shapes["model.layers.0.self_attn.q_norm.weight"][0]
    if shape.num_heads > 1 and (norms < shape.num_heads) != lumina:
        title, family = ("Anole", "anole") if lumina else ("Lumina-mGPT", "lumina_mgpt")
        raise CheckpointError(
            f"{folder}: {norms} query norms for {shape.num_heads} heads, as in {title}: it is not a "
            f"checkpoint of {checkpoint.spec.name}, try model {family!r}"
        )
    codec = read_codec(checkpoint, config, state)
    instruction = ""
    if lumina:
        size = checkpoint.size
        grid = grid_of(size, codec.config.patch_size)
        with reading(folder / "config.json", "give a checkpoint of Lumina-mGPT, or another target_size"):
            side = ids[f"<reserved{SIZES + grid.height // 2:05d}>"]
            cells = replace(cells, row_end=ids[ROW_END])
        image_start = unconditional = [begin, side, side]
        instruction = INSTRUCTION.format(size=size)
    else:
        grid = square_of(checkpoint, codec)
        image_start, unconditional = [begin], [begin_of_text, begin]

    def encode(text: str) -> Prompt:
        words = tokenizer.encode(instruction + text, add_special_tokens=False).ids
        return Prompt([begin_of_text, *words, separator, *image_start], unconditional)

    control = control_tokens(tokenizer.get_added_tokens_decoder().values())
    prompts = PromptEncoder(encode, cells, control=control)
    names = tied(decoder_names(shape), state, config)
    return load_networks(checkpoint, shape, state, names, grid, prompts, codec, CHAMELEON)


def grid_of(size: int, patch: int) -> Grid:
    """Returns Lumina-mGPT's raster for images of size x size pixels and cells of patch x patch.
    CheckpointError if a side is not a whole number of cell pairs, which its size tokens count."""
    if size < 1 or size % (2 * patch):
        raise CheckpointError(
            f"target_size {size}: it must be a multiple of {2 * patch} (two cells of the VQGAN)"
        )
    return Grid(size // patch, size // patch, row_ends=True)


def square_of(checkpoint: Checkpoint, codec: VQModel) -> Grid:
    """Returns the raster of the codec's images. CheckpointError if the options ask for another size."""
    checkpoint.refuse_other_size(codec.config.resolution)
    side = codec.config.resolution // codec.config.patch_size
    return Grid(side, side)


def read_codec(checkpoint: Checkpoint, config: Mapping[str, Any], state: Weights) -> VQModel:
    """Returns the codec in fp32: the checkpoint's, if it contains a decoder as the embedded model does,
    otherwise Meta's from vqgan.ckpt and vqgan.yaml. CheckpointError if there is neither."""
    folder, device = checkpoint.folder, checkpoint.device
    embedded = state.below(VQ).placed(device, torch.float32)
    if any(name.startswith("decoder.") for name in embedded):
        with reading(folder / "config.json"):
            shape = VQConfig.from_hf(config["vq_config"])
        return load_module(lambda: VQModel(shape), embedded, folder)
    folders = search_folders(checkpoint)
    home = next((place for place in folders if (place / "vqgan.ckpt").is_file()), None)
    if home is None:
        raise CheckpointError(
            f"{folder} holds no VQ decoder ({VQ}decoder.*): put Meta's vqgan.ckpt and vqgan.yaml into "
            f"{' or '.join(map(str, folders))}, or give their folder as tokenizer_base_path "
            "(`bash scripts/get_ckpts.sh liquid` fetches a copy)"
        )
    file, description = home / "vqgan.ckpt", home / "vqgan.yaml"
    meta = read_weights(file)
    with reading(description, "fetch it again, beside vqgan.ckpt"):
        shape = VQConfig.from_yaml(description)
    names = {name: name for name in meta if not name.startswith("loss.")}  # without the training loss
    stored = meta.placed(device, torch.float32).renamed(names)
    return load_module(lambda: VQModel(shape), stored, file)
