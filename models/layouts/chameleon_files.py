"""Checkpoints of the Chameleon layout: token ids from config.json's vocabulary_map, the text tokenizer and
the VQGAN beside or inside them; all held against one another before the weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adt_tree.grid import Grid
from models.checkpoint.fields import MOST_TOKENS, check_whole, section
from models.checkpoint.folder import read_config, read_fields, read_tokenizer
from models.checkpoint.meta_init import expected, require
from models.checkpoint.weights import Weights, read_weights
from models.codecs.vq import VQModel
from models.codecs.vqgan import read_codec
from models.drafter import CHAMELEON
from models.errors import CheckpointError
from models.layouts.chameleon import decoder_config, from_chameleon, to_chameleon
from models.layouts.networks import load_networks
from models.model import Model
from models.spec import Checkpoint
from models.target import Prompt, PromptEncoder
from models.transformer import Decoder, DecoderConfig

BEGIN_OF_IMAGE = "<racm3:break>"
SEPARATOR = "<reserved08706>"  # closes the user's turn


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


def prompt_encoder(
    tokenizer: Tokenizer,
    layout: TokenLayout,
    opening: Sequence[int],
    unconditional: Sequence[int],
    instruction: str = "",
) -> PromptEncoder:
    """Texts -> token ids: cond = <s> instruction text <sep> opening; uncond at positions of its own from 0.

    opening: of an image, behind the user's turn. unconditional: a sequence without a text.
    """

    def encode(text: str) -> Prompt:
        ids = tokenizer.encode(instruction + text, add_special_tokens=False).ids
        return Prompt([layout.begin_of_text, *ids, layout.separator, *opening], list(unconditional))

    return PromptEncoder(encode, layout.first_code, layout.num_codes)


@dataclass(frozen=True, slots=True)
class ChameleonFiles:
    """A checkpoint of this layout before its large parts are read: enough to refuse what cannot be."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    layout: TokenLayout
    shape: DecoderConfig
    state: Weights
    codec: VQModel

    def model(self, grid: Grid, prompts: PromptEncoder, row_end: int | None = None) -> Model:
        """The model that draws this grid from these prompts, its weights read; row_end: token id, None
        without row-separator tokens."""
        to_ours = partial(from_chameleon, config=self.shape)
        drawn = (grid, prompts, self.codec, row_end)
        return load_networks(self.checkpoint, self.shape, self.state, to_ours, CHAMELEON, *drawn)


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


def read_chameleon(checkpoint: Checkpoint, shared_norms: bool) -> ChameleonFiles:
    """Open a checkpoint from its folder; see open_chameleon."""
    config, state = read_config(checkpoint.folder), read_weights(checkpoint.folder)
    tokenizer = read_tokenizer(*places(checkpoint))
    return open_chameleon(checkpoint, config, state.tied(config), tokenizer, shared_norms)


def places(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Folders of text_tokenizer.json, vqgan.ckpt and vqgan.yaml: the one given alone, else the target's own
    and the published layout's."""
    inner = Path("chameleon", "tokenizer")
    base, target = checkpoint.options.tokenizer_base_path, checkpoint.folder
    if base is not None:
        return Path(base), Path(base) / inner
    return target, target.parent / inner, checkpoint.spec.home / inner


def open_chameleon(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    state: Weights,
    tokenizer: Tokenizer,
    shared_norms: bool,
) -> ChameleonFiles:
    """Read what is small, check the rest by headers. CheckpointError names what is missing or does not fit.

    shared_norms: queries and keys have one norm for all heads of a shard, as Lumina-mGPT's checkpoints do;
    Anole's have one a head. Either layout would run as the other, and draw noise.
    """
    folder = checkpoint.folder
    layout, shape = read_fields(folder, lambda: (TokenLayout.read(config), decoder_config(config)))
    check_tokenizer(tokenizer, config["vocabulary_map"], shape.vocab_size)
    wanted = expected(lambda: Decoder(shape), lambda own: to_chameleon(own, shape))
    require(folder, state, wanted, "fetch it again, or the config.json that belongs to it")
    norms = state.shapes["model.layers.0.self_attn.q_norm.weight"][0]
    if shape.num_heads > 1 and (norms < shape.num_heads) != shared_norms:
        whose = ("Anole", "anole") if shared_norms else ("Lumina-mGPT", "lumina_mgpt")
        raise CheckpointError(
            f"{folder}: {norms} norms of queries for {shape.num_heads} heads, as in {whose[0]}: this is no "
            f"checkpoint of {checkpoint.spec.name}, try --model {whose[1]}"
        )
    codec = read_codec(config, state, folder, places(checkpoint), checkpoint.device)
    return ChameleonFiles(checkpoint, config, tokenizer, layout, shape, state, codec)
