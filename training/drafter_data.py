"""Makes batches of stored images for a drafter: tokens, the target's features, positions of the loss."""

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
from training.teacher import BRANCHES, drafter_tokens, features

UNCONDITIONAL = 0.1  # share of uncoupled rows that show the unconditional branch, as published
MAX_ENCODED_PROMPTS = 20_000  # number held in memory
REFERENCE_LENGTH = 512  # tokens at which uniform noise has its nominal width, as published


class Images:
    """The stored images of a run, by their numbers. Makes batches of them and caches their features."""

    def __init__(self, model: Model, shards: Shards, cache_bytes: int, max_len: int) -> None:
        """cache_bytes: room for features in memory. max_len: the longest row, in entries."""
        self.model, self.shards, self.device = model, shards, model.codebook.device
        self.max_len, self._room = max_len, cache_bytes
        self._cache: dict[int, list[Tensor]] = {}
        self._prompt = lru_cache(MAX_ENCODED_PROMPTS)(self._encode)
        self._num_tokens = model.grid.length
        row_ends = [*map(model.grid.is_row_end, range(1, model.grid.length))]
        self.is_code = ~torch.tensor(row_ends, device=self.device)

    def _encode(self, image: int) -> EncodedPrompt:
        try:
            return self.model.encode(self.shards.texts[image])
        except ValueError as error:
            raise UserError(f"image {self.shards.names[image]}: {error}") from error

    def features(self, image: int) -> list[Tensor]:
        """Returns the features [T, D] of both branches of an image, from memory, the store or the target."""
        if image in self._cache:
            return self._cache[image]
        if self.shards.has_features:
            branches = [branch.to(self.device) for branch in self.shards.features(image)]
        else:
            branches = features(self.model, self._prompt(image), self.shards.codes[image])
        size = sum(branch.nbytes for branch in branches)
        if size <= self._room:
            self._room -= size
            self._cache[image] = branches
        return branches

    def batch(self, images: Sequence[int], rng: random.Random | None) -> Batch:
        """Returns a batch of the images.

        Without rng it has both branches of every image, all conditional rows first. With rng it has one
        branch of each, the unconditional one with probability UNCONDITIONAL. Raises UserError if a row is
        longer than max_len.
        """
        if rng is None:
            rows = [(image, branch) for branch in range(BRANCHES) for image in images]
        else:
            rows = [(image, int(rng.random() < UNCONDITIONAL)) for image in images]
        branches = {image: self.features(image) for image in images}
        tokens = [
            drafter_tokens(self.model, self._prompt(image), branch, self.shards.codes[image])
            for image, branch in rows
        ]
        longest = max(map(len, tokens))
        if longest > self.max_len:
            raise UserError(f"max_len {self.max_len}: an image and its prompt have {longest} tokens")
        inputs = pad_sequence([branches[image][branch] for image, branch in rows], batch_first=True)
        starts = torch.tensor([len(row) - self._num_tokens for row in tokens])
        entries = starts[:, None] + torch.arange(self._num_tokens - 1)
        padded = pad_sequence(tokens, batch_first=True).to(self.device)
        return Batch(padded, inputs[:, :-1].float(), entries.to(self.device), self.is_code, rng is None)


def noised(batch: Batch, kind: str, mean: float, std: float, generator: torch.Generator) -> Tensor:
    """Returns the batch's features with noise added for the network's input.

    kind: "uniform" of width std * 512 / tokens around 0, "gaussian" of that mean and standard deviation, or
    "none". The noise is sampled on the CPU, so that it is the same on every device.
    """
    shape = batch.features.shape
    if kind == "uniform":
        noise = (torch.rand(shape, generator=generator) - 0.5) * (std * REFERENCE_LENGTH / shape[1])
    elif kind == "gaussian":
        noise = mean + std * torch.randn(shape, generator=generator)
    else:
        return batch.features
    return batch.features + noise.to(batch.features)


def split(names: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns image numbers for training and for validation, at least one of each.

    It depends on the names and the seed, not on the order of the images on disk.
    """
    order = sorted(range(len(names)), key=lambda image: names[image])
    random.Random(seed).shuffle(order)
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    return sorted(order[:count]), sorted(order[count:])


def epoch_order(images: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Returns the images in the order of an epoch, which every process and every resumed run shares."""
    order = list(images)
    random.Random(1_000_003 * seed + epoch).shuffle(order)
    return order
