"""LlamaGen's prompts: projected text rows or one class row, behind padding up to the rows of no text.

Published facts: a learned unconditional embedding under the conditional row's padding mask.

Dimensions: T rows of the prefix (120, or 1 for a class), C size of a text feature, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layouts.t5 import T5Text
from models.target import Lead, PromptEncoder, keep_all
from models.transformer import Decoder


@dataclass(frozen=True, slots=True)
class PaddedPrompt:
    """An EncodedPrompt of rows of text or of a class, behind padding up to the T rows of no text.

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


def text_prompts(text: T5Text, project: CaptionProjector, num_codes: int, keep: bool) -> PromptEncoder:
    """Texts -> their projected features, and the rows of no text. keep: hold the text encoder in memory when
    the prompts of a run are encoded."""
    weight = project.uncond_embedding
    with torch.inference_mode():
        nothing = project(weight)

    @torch.inference_mode()
    def encode(words: str) -> PaddedPrompt:
        return PaddedPrompt(project(text.encode(words).to(weight.device, weight.dtype)), nothing)

    return PromptEncoder(encode, 0, num_codes, release=keep_all if keep else text.release)


def class_prompts(table: Tensor, num_codes: int) -> PromptEncoder:
    """Class ids in decimal -> the row of the class, and that of no class: the last of table [classes + 1, D].
    Encoding raises ValueError if there is no such class."""
    classes = len(table) - 1

    def encode(words: str) -> PaddedPrompt:
        if not words.isdecimal() or int(words) >= classes:
            raise ValueError(
                f"prompt {words!r}: this model draws classes; give ids from 0 to {classes - 1} by "
                "--class_labels"
            )
        return PaddedPrompt(table[int(words)][None], table[-1:])

    return PromptEncoder(encode, 0, num_codes, classes)
