"""What a model needs of its codec: the code vectors, and pixels where it can make them of codes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adt_tree.errors import UserError
from models.codecs.vq import VQConfig


class Codec(Protocol):
    """Maps between codes [B, h, w] int64 and images [B, 3, H, W] in [-1, 1]."""

    @property
    def codebook(self) -> Tensor:
        """The code vectors [V, C], whose distances LANTERN compares."""

    @property
    def config(self) -> VQConfig | None:
        """The sizes of codes and pixels; None if there are no pixels."""

    @property
    def missing(self) -> str:
        """The reason why codes alone do not become pixels, for the user; empty if they do."""

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the images of codes, not clamped. UserError if there are no pixels."""

    def encode(self, images: Tensor) -> Tensor:
        """Returns the codes of images. UserError if this codec cannot encode."""


@dataclass(frozen=True, slots=True)
class CodeVectors:
    """The Codec of a model whose codes become pixels elsewhere, or not at all."""

    codebook: Tensor
    missing: str
    config: None = None

    def decode(self, codes: Tensor) -> Tensor:
        raise UserError(self.missing)

    def encode(self, images: Tensor) -> Tensor:
        raise UserError(self.missing)
