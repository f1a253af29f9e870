"""Batches of stored images for the drafter: tokens, the target's features, positions of the loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adt_tree.errors import UserError
from models.model import Model
from models.target import EncodedPrompt
from training.drafter_loss import Batch
from training.shards import Shards
from training.teacher import BRANCHES, drafter_tokens, features, image_tokens

UNCONDITIONAL = 0.1  # share of uncoupled rows that are of the unconditional branch, as published
MOST_OPENINGS = 20_000  # prompts kept encoded
REFERENCE_LENGTH = 512  # tokens at which uniform noise has its nominal width, as published


class Images:
    """Stored images by number, as rows of training."""

    def __init__(self, model: Model, shards: Shards, cache_bytes: int, max_len: int) -> None:
        """cache_bytes: of features kept in memory. max_len: entries of a row; UserError if an image has
        more."""
        self.model, self.shards, self.device = model, shards, model.codebook.device
        self.max_len, self._room = max_len, cache_bytes
        self._cache: dict[int, list[Tensor]] = {}
        self._opening = lru_cache(MOST_OPENINGS)(self._encode)
        tokens = image_tokens(model, torch.zeros(model.grid.size))
        self._tokens = len(tokens)
        self.chooses = (tokens[1:] == 0).to(self.device)  # what is not code 0 here ends a row

    def _encode(self, image: int) -> EncodedPrompt:
        try:
            return self.model.encode(self.shards.texts[image])
        except ValueError as error:
            raise UserError(f"image {self.shards.names[image]}: {error}") from error

    def features(self, image: int) -> list[Tensor]:
        """Both branches' features [T, D] of an image, from memory, from the store or from the target.

        A pass of the target takes one image: features must not depend, to the last bit, on what else is in
        it, and on a CPU one fills the cores.
        """
        if image in self._cache:
            return self._cache[image]
        if self.shards.has_features:
            parts = [part.to(self.device) for part in self.shards.features(image)]
        else:
            parts = features(self.model, [self._opening(image)], self.shards.codes[image][None])[0]
        size = sum(part.nbytes for part in parts)
        if size <= self._room:
            self._room -= size
            self._cache[image] = parts
        return parts

    def batch(self, images: Sequence[int], rng: random.Random | None) -> Batch:
        """Rows of the images: both branches of each, all conditional ones first; with rng one branch each,
        unconditional in UNCONDITIONAL of draws."""
        if rng is None:
            rows = [(image, branch) for branch in range(BRANCHES) for image in images]
        else:
            rows = [(image, int(rng.random() < UNCONDITIONAL)) for image in images]
        known = {image: self.features(image) for image in images}
        tokens = [
            drafter_tokens(self.model, self._opening(image), branch, self.shards.codes[image])
            for image, branch in rows
        ]
        longest = max(map(len, tokens))
        if longest > self.max_len:
            raise UserError(f"--max_len {self.max_len}: an image and its prompt have {longest} tokens")
        inputs = pad_sequence([known[image][branch] for image, branch in rows], batch_first=True)
        starts = torch.tensor([len(row) - self._tokens for row in tokens])
        where = starts[:, None] + torch.arange(self._tokens - 1)
        padded = pad_sequence(tokens, batch_first=True).to(self.device)
        return Batch(padded, inputs[:, :-1].float(), where.to(self.device), self.chooses, rng is None)


def noised(batch: Batch, kind: str, mean: float, std: float, generator: torch.Generator) -> Tensor:
    """The batch's features with noise for the network's input: uniform of width std * 512 / tokens about 0,
    normal(mean, std), or none. Drawn on the CPU: the same on every device."""
    shape, like = batch.features.shape, batch.features
    if kind == "uniform":
        drawn = (torch.rand(shape, generator=generator) - 0.5) * (std * REFERENCE_LENGTH / shape[1])
    elif kind == "gaussian":
        drawn = mean + std * torch.randn(shape, generator=generator)
    else:
        return like
    return like + drawn.to(like)


def split(names: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Image numbers for training and for validation; a function of names and seed, whatever their order on
    disk. At least one image of each."""
    order = sorted(range(len(names)), key=lambda image: names[image])
    random.Random(seed).shuffle(order)
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    return sorted(order[:count]), sorted(order[count:])


def epoch_order(images: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The images in the order of an epoch: the same for every process and after every resume."""
    order = list(images)
    random.Random(1_000_003 * seed + epoch).shuffle(order)
    return order
