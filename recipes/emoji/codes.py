"""Encodes the pictures of a stream in chunks, before training needs them, and stores their codes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.checkpoint.files import replacing
from recipes.emoji.pictures import Picture, Pictures
from recipes.emoji.tokenizer import Tokenizer

CHUNK = 4096  # pictures per file


def digest(tokenizer: Tokenizer) -> str:
    """Returns 16 hexadecimal digits that identify a tokenizer by everything that its codes depend on."""
    digest = hashlib.sha256()
    for tensor in (tokenizer.book.weight, tokenizer.book.count, torch.tensor(tokenizer.rate)):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class Codes:
    """Pictures of a stream with their codes, by number. Missing ones are rendered and encoded first."""

    def __init__(self, work: Path, pictures: Pictures, tokenizer: Tokenizer) -> None:
        self.pictures, self.tokenizer = pictures, tokenizer
        self.digest = digest(tokenizer)
        self.folder = work / "codes" / self.digest
        self._chunk = lru_cache(1)(self._read_chunk)
        self.sample = cache(self._sample)

    def encode(self, planned: Sequence[Picture]) -> Tensor:
        """Returns the codes [N, n] int64 of planned pictures."""
        parts = [planned[i : i + 256] for i in range(0, len(planned), 256)]
        images = (torch.from_numpy(self.pictures.render(part)) for part in parts)
        return torch.cat([self.tokenizer.encode(part).flatten(1) for part in images])

    def _read_chunk(self, stream: str, number: int) -> Tensor:
        """Returns the codes [CHUNK, n] of the pictures from number * CHUNK on."""
        path = self.folder / f"{stream}-{number:05d}.npy"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            planned = self.pictures.plan(stream, range(number * CHUNK, (number + 1) * CHUNK))
            with replacing(path) as part, part.open("wb") as file:
                np.save(file, self.encode(planned).to(torch.int16).numpy())
        return torch.from_numpy(np.load(path)).long()

    def batch(self, stream: str, first: int, count: int) -> tuple[list[Picture], Tensor]:
        """Returns the pictures first .. first + count - 1 of a stream, and their codes [count, n]."""
        numbers = range(first, first + count)
        codes = [self._chunk(stream, number // CHUNK)[number % CHUNK] for number in numbers]
        return self.pictures.plan(stream, numbers), torch.stack(codes)

    def _sample(self, stream: str, count: int) -> tuple[list[Picture], Tensor]:
        """Returns the first pictures of a stream that is not trained on, and their codes, from memory."""
        planned = self.pictures.plan(stream, range(count))
        return planned, self.encode(planned)
