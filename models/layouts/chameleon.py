"""Checkpoints of the Chameleon layout: Anole and the embedded model, a raster of codes alone; Lumina-mGPT,
square images of several sizes, told by tokens, whose rows a token ends.

Token ids are those of config.json's vocabulary_map; the text tokenizer and the VQGAN lie beside or inside the
checkpoint; all is held against one another before the weights are read. Facts: transformers'
ChameleonForConditionalGeneration; reference code of Alpha-VLLM/Lumina-mGPT and jadohu/LANTERN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from adt_tree.errors import CheckpointError, reason
from adt_tree.grid import Grid
from models.checkpoint.config import (
    MOST_TOKENS,
    check_whole,
    read_config,
    read_fields,
    read_tokenizer,
    section,
)
from models.checkpoint.meta_init import build, expected, require
from models.checkpoint.weights import Weights, read_weights
from models.codecs.vq import VQConfig, VQModel
from models.drafter import CHAMELEON
from models.layouts.llama import decoder_names, gather, scatter
from models.model import Model, load_networks
from models.spec import Checkpoint
from models.target import Prompt, PromptEncoder
from models.transformer import Decoder, read_shape

BEGIN_OF_IMAGE = "<racm3:break>"
SEPARATOR = "<reserved08706>"  # closes the user's turn
VQ, CODEBOOK = "model.vqmodel.", "quantize.embedding.weight"
# Lumina-mGPT's own
ROW_END = "<reserved08799>"
SIZES = 8800  # <reserved0NNNN> of NNNN = SIZES + n: n pairs of cells
INSTRUCTION = "Generate an image of {size}x{size} according to the following prompt:\n"


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the vocabulary keeps what a prompt needs. Codebook id = token id - first_code."""

    first_code: int
    num_codes: int
    begin_of_text: int
    begin_of_image: int
    separator: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TokenLayout:
        """From config.json. ValueError names what the vocabulary lacks."""
        vocabulary = section(config, "vocabulary_map")
        if not vocabulary:
            raise ValueError("config.json has no vocabulary_map: this is not a Chameleon checkpoint")
        for name, index in vocabulary.items():
            check_whole(f"vocabulary_map: token {name}", index, MOST_TOKENS, least=0)
        images = sorted((index, name) for name, index in vocabulary.items() if name.startswith("IMGIMG"))
        codes = [index for index, _ in images]
        if not codes or codes[-1] - codes[0] + 1 != len(codes):
            raise ValueError("vocabulary_map: the image tokens (IMGIMG...Z) are missing or not contiguous")
        numbers = [(len(name), name) for _, name in images]  # digits written as A to J
        if numbers != sorted(numbers):
            raise ValueError(
                "vocabulary_map: the image tokens (IMGIMG...Z) are not in the order of their codes"
            )
        for name in ("<s>", BEGIN_OF_IMAGE, SEPARATOR):
            if name not in vocabulary:
                raise ValueError(f"vocabulary_map: token {name} is missing")
        return cls(codes[0], len(codes), vocabulary["<s>"], vocabulary[BEGIN_OF_IMAGE], vocabulary[SEPARATOR])


def load(checkpoint: Checkpoint) -> Model:
    """A model of this layout from its files."""
    config, state = read_config(checkpoint.folder), read_weights(checkpoint.folder)
    return assemble(checkpoint, config, state.tied(config), read_tokenizer(*places(checkpoint)))


def places(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Folders of text_tokenizer.json, vqgan.ckpt and vqgan.yaml: the one given alone, else the target's own
    and the published layout's."""
    inner = Path("chameleon", "tokenizer")
    base, target = checkpoint.options.tokenizer_base_path, checkpoint.folder
    if base is not None:
        return Path(base), Path(base) / inner
    return target, target.parent / inner, checkpoint.spec.home / inner


def assemble(
    checkpoint: Checkpoint, config: Mapping[str, Any], state: Weights, tokenizer: Tokenizer
) -> Model:
    """The model of that configuration and weights. CheckpointError names what is missing or does not fit."""
    folder, lumina = checkpoint.folder, checkpoint.spec.name == "lumina_mgpt"
    layout, shape = read_fields(folder, lambda: (TokenLayout.read(config), read_shape(config)))
    check_tokenizer(tokenizer, config["vocabulary_map"], shape.vocab_size)
    names = decoder_names(shape)
    wanted = expected(lambda: Decoder(shape), lambda own: scatter(own, names, shape))
    require(folder, state, wanted, "fetch it again, or the config.json that belongs to it")
    # Norms of one family would run as those of the other, and draw noise.
    norms = state.shapes["model.layers.0.self_attn.q_norm.weight"][0]
    if shape.num_heads > 1 and (norms < shape.num_heads) != lumina:
        whose = ("Anole", "anole") if lumina else ("Lumina-mGPT", "lumina_mgpt")
        raise CheckpointError(
            f"{folder}: {norms} norms of queries for {shape.num_heads} heads, as in {whose[0]}: this is no "
            f"checkpoint of {checkpoint.spec.name}, try --model {whose[1]}"
        )
    codec = read_codec(checkpoint, config, state)
    begin, instruction, row_end = layout.begin_of_image, "", None
    if lumina:
        size = checkpoint.size
        grid = grid_of(size, codec.config.patch_size)
        row_end, side = lumina_tokens(checkpoint, config, grid)
        opening = unconditional = [begin, side, side]
        instruction = INSTRUCTION.format(size=size)
    else:
        checkpoint.refuse_other_size(codec.config.resolution)
        side = codec.config.resolution // codec.config.patch_size
        grid = Grid(side, side)
        opening, unconditional = [begin], [layout.begin_of_text, begin]

    def encode(text: str) -> Prompt:
        ids = tokenizer.encode(instruction + text, add_special_tokens=False).ids
        return Prompt([layout.begin_of_text, *ids, layout.separator, *opening], unconditional)

    prompts = PromptEncoder(encode, layout.first_code, layout.num_codes)
    to_ours = partial(gather, names=names, config=shape)
    return load_networks(checkpoint, shape, state, to_ours, CHAMELEON, grid, prompts, codec, row_end)


def check_tokenizer(tokenizer: Tokenizer, vocabulary: Mapping[str, int], size: int) -> None:
    """CheckpointError if text would become token ids of another vocabulary."""
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= size:
        raise CheckpointError(
            f"the text tokenizer has token ids up to {highest}, config.json's vocab_size is {size}: give the "
            "text_tokenizer.json of this model"
        )
    for name in (BEGIN_OF_IMAGE, SEPARATOR):
        found = tokenizer.token_to_id(name)
        if found not in (None, vocabulary[name]):
            raise CheckpointError(
                f"the text tokenizer has {name} at {found}, config.json at {vocabulary[name]}: give the "
                "text_tokenizer.json of this model"
            )


def grid_of(size: int, patch: int) -> Grid:
    """Lumina's raster of `size` pixels in cells of `patch`. CheckpointError without whole pairs of cells."""
    if size < 1 or size % (2 * patch):
        raise CheckpointError(
            f"--target_size {size}: it must be a multiple of {2 * patch}, two cells of the VQGAN"
        )
    return Grid(size // patch, size // patch)


def lumina_tokens(checkpoint: Checkpoint, config: Mapping[str, Any], grid: Grid) -> list[int]:
    """Ids of the tokens that end a row and that say the grid's side. CheckpointError if one is missing."""
    vocabulary, names = config["vocabulary_map"], (ROW_END, f"<reserved{SIZES + grid.height // 2:05d}>")
    for name in names:
        if name not in vocabulary:
            raise CheckpointError(
                f"{checkpoint.folder / 'config.json'}: vocabulary_map: token {name} is missing: this is no "
                "checkpoint of Lumina-mGPT"
            )
    return [vocabulary[name] for name in names]


def read_codec(checkpoint: Checkpoint, config: Mapping[str, Any], state: Weights) -> VQModel:
    """The codec, fp32: from the checkpoint where it has a decoder (the embedded model), else Meta's
    vqgan.ckpt and vqgan.yaml. CheckpointError if there is no decoder anywhere, or if the one found decodes
    another codebook."""
    folder, device = checkpoint.folder, checkpoint.device
    own = state.below(VQ).placed(device, torch.float32)
    if any(name.startswith("decoder.") for name in own):
        shape = read_fields(folder, lambda: VQConfig.from_hf(section(config, "vq_config", required=True)))
        return build(lambda: VQModel(shape), own, folder)
    home = next((place for place in places(checkpoint) if (place / "vqgan.ckpt").is_file()), None)
    if home is None:
        wanted = " or ".join(str(place) for place in places(checkpoint))
        raise CheckpointError(
            f"{folder} holds no VQ decoder ({VQ}decoder.*): put Meta's vqgan.ckpt and vqgan.yaml into "
            f"{wanted}, or say where they are by --tokenizer_base_path"
        )
    file, description = home / "vqgan.ckpt", home / "vqgan.yaml"
    meta, stored = read_weights(file), state.below(VQ)
    if CODEBOOK in stored and CODEBOOK in meta:
        mine, theirs = stored[CODEBOOK].float(), meta[CODEBOOK].float()
        # The checkpoint's copy may be rounded to its own precision.
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, atol=1e-2, rtol=2e-2):
            raise CheckpointError(f"{file}: its codebook is not that of {folder}: give this model's VQGAN")
    if not description.is_file():
        raise CheckpointError(f"{description} does not exist: it belongs beside vqgan.ckpt, fetch both")
    try:
        shape = VQConfig.from_yaml(description)
    except Exception as error:  # yaml's errors, and whatever a file of another layout leads to
        raise CheckpointError(
            f"{description} does not describe a VQGAN ({reason(error)}): fetch it again"
        ) from None
    # Tensors of its training loss are left out.
    kept = meta.placed(device, torch.float32).renamed({n: n for n in meta if not n.startswith("loss.")})
    return build(lambda: VQModel(shape), kept, file)
