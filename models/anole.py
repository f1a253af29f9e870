"""Anole and the embedded emoji model: the Chameleon layout with a raster of codes and no line tokens.

Everything is read from the checkpoint's own files: ids from config.json's vocabulary_map, the grid from
vq_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from adt_tree.grid import Grid
from models.chameleon import decoder_config, from_chameleon, to_chameleon
from models.checkpoint import build, read_config, read_fields, read_tokenizer
from models.codec import read_codec
from models.drafter import DrafterNet, load_drafter
from models.errors import CheckpointError
from models.fit import expected, require
from models.model import Model, Source
from models.target import Prompt, PromptEncoder
from models.transformer import Decoder
from models.vq import VQModel
from models.weights import read_weights

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
        vocabulary = config.get("vocabulary_map")
        if not vocabulary:
            raise ValueError("config.json has no vocabulary_map: this is not a Chameleon checkpoint")
        codes = sorted(index for name, index in vocabulary.items() if name.startswith("IMGIMG"))
        if not codes or codes[-1] - codes[0] + 1 != len(codes):
            raise ValueError("vocabulary_map: the image tokens (IMGIMG...Z) are missing or not contiguous")
        for name in ("<s>", BEGIN_OF_IMAGE, SEPARATOR):
            if name not in vocabulary:
                raise ValueError(f"vocabulary_map: token {name} is missing")
        return cls(codes[0], len(codes), vocabulary["<s>"], vocabulary[BEGIN_OF_IMAGE], vocabulary[SEPARATOR])


def grid_of(config: Mapping[str, Any]) -> Grid:
    """The raster of one image: resolution over the encoder's stride, 2 for each level but the first."""
    vq = config["vq_config"]
    side = vq["resolution"] >> (len(vq["channel_multiplier"]) - 1)
    return Grid(side, side)


@dataclass(frozen=True, slots=True)
class Prompts:
    """See models.target.PromptEncoder."""

    tokenizer: Tokenizer
    layout: TokenLayout

    @property
    def first_code(self) -> int:
        """Token id of code 0."""
        return self.layout.first_code

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""
        return self.layout.num_codes

    def encode(self, text: str) -> Prompt:
        """cond = <s> text <sep> <begin of image>; uncond = <s> <begin of image> at positions of its own from
        0."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        layout = self.layout
        return Prompt(
            [layout.begin_of_text, *ids, layout.separator, layout.begin_of_image],
            [layout.begin_of_text, layout.begin_of_image],
        )


@dataclass(frozen=True, slots=True)
class Chameleon:
    """What every checkpoint of this layout holds, whatever images are drawn with it."""

    config: Mapping[str, Any]
    tokenizer: Tokenizer
    layout: TokenLayout
    decoder: Decoder
    codec: VQModel
    drafter_net: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None

    def model(self, name: str, grid: Grid, prompts: PromptEncoder, row_end: int | None = None) -> Model:
        """The model that draws this grid from these prompts; row_end: token id, None without row ends."""
        codebook = self.codec.quantize.embedding.weight
        return Model(
            name, grid, prompts, self.decoder, codebook, self.codec, self.drafter_net,
            self.weights_sha, self.drafter_sha, row_end,
        )  # fmt: skip


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


def read_chameleon(source: Source) -> Chameleon:
    """Everything but grid and prompts. CheckpointError names what is missing or does not fit."""
    folder = source.folder
    config = read_config(folder)
    layout, shape = read_fields(folder, lambda: (TokenLayout.read(config), decoder_config(config)))
    state, tokenizer = read_weights(folder), read_tokenizer(*source.places)
    check_tokenizer(tokenizer, config["vocabulary_map"], shape.vocab_size)
    wanted = expected(lambda: Decoder(shape), lambda own: to_chameleon(own, shape))
    require(folder, state, wanted, "fetch it again, or the config.json that belongs to it")
    # The small parts first, so that what is wrong with them is known before the target is read.
    codec = read_codec(config, state, folder, source.places, source.device)
    codes = codec.config.num_embeddings
    if codes != layout.num_codes:
        raise CheckpointError(
            f"{folder}: the vocabulary has {layout.num_codes} image tokens, the VQGAN {codes} codes: "
            "they belong to different models"
        )
    net, drafter_sha = None, None
    if source.drafter is not None:
        net, drafter_sha = load_drafter(source.drafter, shape, source.dtype, source.device)
    placed = state.placed(source.device, source.dtype)
    decoder = build(
        lambda: Decoder(shape), lambda: from_chameleon(placed, shape), source.dtype, source.device, folder
    )
    return Chameleon(config, tokenizer, layout, decoder, codec, net, placed.digest(), drafter_sha)


def load(source: Source) -> Model:
    """Anole, or the embedded model. A --target_size that is not the checkpoint's own is refused."""
    parts = read_chameleon(source)
    grid = read_fields(source.folder, lambda: grid_of(parts.config))
    size = grid.height * parts.codec.config.patch_size
    if source.target_size not in (None, size):
        raise CheckpointError(
            f"--target_size {source.target_size}: this model draws {size} px and no other size; leave it out"
        )
    return parts.model(source.name, grid, Prompts(parts.tokenizer, parts.layout))
