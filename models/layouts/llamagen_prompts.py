"""LlamaGen's prompts: padding, followed by rows of projected text features or by one row for a class.

As in the published code, the unconditional branch is a learned embedding of T rows, of which attention masks
the first T - n, as many as the conditional branch has rows of padding.

Dimensions: T rows of the prefix (120, or 1 for a class), n rows without padding, C size of a text feature, D
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adt_tree.engine_cache import free_memory
from adt_tree.errors import CheckpointError, UserError
from models.cell_tokens import CellIds
from models.checkpoint.config import read_config, read_tokenizer
from models.checkpoint.files import reading
from models.decoder.transformer import Decoder
from models.layouts.captions import clean
from models.target import EmbeddedPrefix, PromptEncoder


@dataclass(frozen=True, slots=True)
class PaddedPrompt:
    """An EncodedPrompt of embedded rows, padded in front to the T rows of the unconditional branch.

    Both branches treat the first T - n rows as padding. The other rows never attend to padding. A row of
    padding attends to the padding up to itself, as in the released code in bf16. The published drafters run
    in bf16 and read the features of these rows too.
    """

    conditional: Tensor  # [n, D], n <= T
    unconditional: Tensor  # [T, D]
    warnings: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        return len(self.unconditional)

    def embed(self, branch: int, decoder: Decoder) -> EmbeddedPrefix:
        padding = self.length - len(self.conditional)
        rows = self.unconditional if branch else F.pad(self.conditional, (0, 0, padding, 0))
        order = torch.arange(self.length, device=rows.device)
        padded = order < padding
        seen = (order[:, None] >= order) & (padded[:, None] | ~padded)
        return EmbeddedPrefix(rows[None], seen[None], padding)

    def tokens(self, branch: int) -> list[int]:
        return [0] * self.length  # these prompts have no token ids: the drafter embeds code 0 for each row


class T5Text:
    """The T5 encoder of transformers, which turns texts into features [n, C] without padding. The weights are
    loaded for the first text and can be released again.

    The published code pads texts to a fixed length and masks the padding, so its features are the same.
    """

    def __init__(self, folder: Path, width: int, max_tokens: int, device: torch.device) -> None:
        """folder: a T5 checkpoint with its tokenizer. width: C of the target. max_tokens: longer texts are
        cut off. The encoder runs in bf16 on an accelerator, as published, and in fp32 on the CPU.
        CheckpointError if its features are not `width` wide."""
        encoder_width = read_config(folder).get("d_model")
        if encoder_width != width:
            raise CheckpointError(
                f"{folder}: the features of this text encoder are {encoder_width} wide, the target takes "
                f"{width}: give the encoder it was trained with (google/flan-t5-xl) as text_encoder"
            )
        self.folder, self.device = folder, device
        self.tokenizer = read_tokenizer(folder)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        self._encoder: Any = None

    @torch.inference_mode()
    def encode(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        """Returns the features of the cleaned text, those of the end-of-text token included, and warnings:
        that nothing is left of the text, or that its end is cut off."""
        encoder = self._encoder = self._encoder or self._load()  # another thread may release it
        cleaned = clean(text)
        tokens = self.tokenizer.encode(cleaned)
        warnings: tuple[str, ...] = ()
        if not cleaned:
            warnings = ("cleaning leaves nothing of it, so its image is that of an empty text",)
        if tokens.overflowing:
            warnings = (f"only its first {len(tokens.ids)} tokens are read",)
        ids = torch.tensor([tokens.ids], device=self.device)
        return encoder(input_ids=ids).last_hidden_state[0], warnings

    def release(self) -> None:
        """Frees the weights. The next encode() loads them again."""
        self._encoder = None
        free_memory(self.device)

    def _load(self) -> Any:
        from transformers import T5EncoderModel, logging

        read: Any = T5EncoderModel.from_pretrained
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # no table of the T5 decoder's tensors, which are left out
        logging.disable_progress_bar()  # they would stand before the one line of an error
        try:
            with reading(self.folder, "fetch the text encoder again"):
                encoder, report = read(
                    self.folder, dtype=dtype, local_files_only=True, output_loading_info=True
                )
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        if missing := sorted(report["missing_keys"]):
            raise CheckpointError(
                f"{self.folder}: the text encoder lacks {len(missing)} tensors, the first is {missing[0]}: "
                "fetch it again"
            )
        return encoder.to(self.device).requires_grad_(False).eval()


class CaptionProjector(nn.Module):
    """Projects text features [..., C] to embedded rows [..., D], and holds the learned features of the
    unconditional branch. It has no bias, so zeros stay zeros."""

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
        """Returns fc2(gelu(fc1(features))), with the tanh form of gelu."""
        return self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))


def text_prompts(
    text: T5Text, project: CaptionProjector, cells: CellIds, keep_encoder: bool
) -> PromptEncoder:
    """Returns an encoder of texts as their projected features. keep_encoder: keep T5 in memory when all
    prompts of a run are encoded."""
    weight = project.uncond_embedding
    with torch.inference_mode():
        unconditional = project(weight)

    @torch.inference_mode()
    def encode(words: str) -> PaddedPrompt:
        features, warnings = text.encode(words)
        rows = project(features.to(weight.device, weight.dtype))
        return PaddedPrompt(rows, unconditional, warnings)

    return PromptEncoder(encode, cells, release=(lambda: None) if keep_encoder else text.release)


def class_prompts(table: Tensor, cells: CellIds) -> PromptEncoder:
    """Returns an encoder of decimal class ids as rows of table [classes + 1, D]; the last row is that of the
    unconditional branch. encode() raises UserError if there is no such class."""
    classes = len(table) - 1

    def encode(words: str) -> PaddedPrompt:
        if not words.isdecimal() or int(words) >= classes:
            raise UserError(
                f"prompt {words!r}: this model generates classes; give ids from 0 to {classes - 1} by "
                "class_labels"
            )
        return PaddedPrompt(table[int(words)][None], table[-1:])

    return PromptEncoder(encode, cells, num_classes=classes)
