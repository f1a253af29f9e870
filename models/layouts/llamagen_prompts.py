"""LlamaGen's prompts: projected text rows or one class row, behind padding up to the rows of no text.

Published facts: a learned unconditional embedding under the conditional row's padding mask.

Dimensions: T rows of the prefix (120, or 1 for a class), C size of a text feature, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.target import Lead, PromptEncoder
from models.transformer import Decoder


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Rows of text or of a class, behind padding up to the T rows of no text (see models.target).

    Both branches share the conditional's padding. A real row sees none of it; a row of padding sees the
    padding up to itself, as in the released code in bf16, the regime of the published drafters, which read
    the features of these rows; with `ahead` also the real rows behind, as in that code in fp32.
    """

    conditional: Tensor  # [n, D], n <= T
    unconditional: Tensor  # [T, D]
    ahead: bool = False

    @property
    def length(self) -> int:
        """Rows, padding included."""
        return len(self.unconditional)

    def lead(self, branch: int, decoder: Decoder) -> Lead:
        """See models.target.EncodedPrompt."""
        padding = self.length - len(self.conditional)
        rows = self.unconditional if branch else F.pad(self.conditional, (0, 0, padding, 0))
        order = torch.arange(self.length, device=rows.device)
        padded = order < padding
        seen = (order[:, None] >= order) & (padded[:, None] | ~padded)
        if self.ahead:
            seen |= padded[:, None] & ~padded
        return Lead(rows[None], seen[None], padding)

    def tokens(self, branch: int) -> list[int]:
        """See models.target.EncodedPrompt: the drafter takes the prefix for so many codes 0."""
        return [0] * self.length


class TextEncoder(Protocol):
    """A text -> features [n, C], n at most T."""

    def encode(self, text: str) -> Tensor:
        """Features of a text."""

    def release(self) -> None:
        """Free what encode() needs; it would come back."""


class CaptionProjector(nn.Module):
    """Text features [..., C] -> rows [..., D], zeros to zeros; and the learned features of no text."""

    def __init__(self, rows: int, features: int, hidden_size: int) -> None:
        super().__init__()
        self.uncond_embedding = nn.Parameter(torch.zeros(rows, features))
        self.cap_proj = nn.ModuleDict(
            {
                "fc1": nn.Linear(features, hidden_size, bias=False),
                "fc2": nn.Linear(hidden_size, hidden_size, bias=False),
            }
        )

    def forward(self, features: Tensor) -> Tensor:
        """fc2(gelu(fc1(x))), gelu by its tanh form."""
        return self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))


class LabelEmbedder(nn.Module):
    """Class ids -> rows; the last of the table is no class."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(rows, hidden_size)


class TextPrompts(PromptEncoder):
    """Texts."""

    first_code = 0

    def __init__(self, text: TextEncoder, project: CaptionProjector, num_codes: int, keep: bool) -> None:
        """keep: hold the text encoder in memory when the prompts of a run are encoded."""
        self.text, self.project, self.num_codes, self.keep = text, project, num_codes, keep
        with torch.inference_mode():
            self.nothing = project(project.uncond_embedding)

    @torch.inference_mode()
    def encode(self, text: str) -> EncodedPrompt:
        """The projected features of the text, and the rows of no text."""
        weight = self.project.uncond_embedding
        features = self.text.encode(text).to(weight.device, weight.dtype)
        return EncodedPrompt(self.project(features), self.nothing)

    def release(self) -> None:
        """Free the text encoder, unless it is to stay."""
        if not self.keep:
            self.text.release()


class ClassPrompts(PromptEncoder):
    """Class ids, in decimal."""

    first_code = 0

    def __init__(self, labels: LabelEmbedder, num_codes: int) -> None:
        self.labels, self.num_codes = labels, num_codes
        self.num_classes = len(labels.embedding_table.weight) - 1

    def encode(self, text: str) -> EncodedPrompt:
        """The row of the class, and that of no class. ValueError if there is no such class."""
        if not text.isdecimal() or int(text) >= self.num_classes:
            raise ValueError(
                f"prompt {text!r}: this model draws classes; give ids from 0 to {self.num_classes - 1} by "
                "--class_labels"
            )
        table = self.labels.embedding_table.weight
        return EncodedPrompt(table[int(text)][None], table[-1:])
