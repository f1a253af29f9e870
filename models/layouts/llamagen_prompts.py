"""LlamaGen's prompts: projected text rows or one class row, behind padding up to the rows of no text.

Published facts: a learned unconditional embedding under the conditional row's padding mask.

Dimensions: T rows of the prefix (120, or 1 for a class), C size of a text feature, D features.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adt_tree.errors import CheckpointError, UserError, reason
from models.checkpoint.config import read_config, read_tokenizer
from models.layouts.captions import clean
from models.target import Lead, PromptEncoder
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


class T5Text:
    """The T5 encoder of transformers, loaded when first asked and freed on request: texts -> features [n, C],
    the end-of-text token included and no padding.

    Features of a text do not depend on padding: the published code pads to `most` tokens and masks it.
    """

    def __init__(self, folder: Path, width: int, most: int, device: torch.device) -> None:
        """folder: a T5 checkpoint with its tokenizer. width: C. most: tokens a text is cut to. bf16 on an
        accelerator, as published, fp32 on the CPU. CheckpointError if C is another."""
        found = read_config(folder).get("d_model")
        if found != width:
            raise CheckpointError(
                f"{folder}: a text encoder {found} wide, the target takes {width}: give the one it was "
                "trained with by --text_encoder (google/flan-t5-xl)"
            )
        self.folder, self.device = folder, device
        self.tokenizer = read_tokenizer(folder)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(most)
        self._encoder: Any = None

    @torch.inference_mode()
    def encode(self, text: str) -> Tensor:
        """Features of the cleaned text."""
        if self._encoder is None:
            self._encoder = self._load()
        ids = self.tokenizer.encode(clean(text)).ids
        return self._encoder(input_ids=torch.tensor([ids], device=self.device)).last_hidden_state[0]

    def release(self) -> None:
        """Free the encoder; encode() would load it again."""
        self._encoder = None
        # Only the collector frees a module that something of its own refers back to, as a hook does.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        from safetensors import SafetensorError
        from transformers import T5EncoderModel, logging

        read: Any = T5EncoderModel.from_pretrained
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # a whole T5 has a decoder too: no table of what was left out
        logging.disable_progress_bar()  # an error is one line
        try:
            encoder, found = read(self.folder, dtype=dtype, local_files_only=True, output_loading_info=True)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder}: the text encoder cannot be loaded ({reason(error)}): fetch it again"
            ) from None
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        if missing := sorted(found["missing_keys"]):
            raise CheckpointError(
                f"{self.folder}: the text encoder lacks {len(missing)} tensors, first {missing[0]}: fetch it "
                "again"
            )
        return encoder.to(self.device).requires_grad_(False).eval()


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

    return PromptEncoder(encode, 0, num_codes, release=(lambda: None) if keep else text.release)


def class_prompts(table: Tensor, num_codes: int) -> PromptEncoder:
    """Class ids in decimal -> the row of the class, and that of no class: the last of table [classes + 1, D].
    Encoding raises UserError if there is no such class."""
    classes = len(table) - 1

    def encode(words: str) -> PaddedPrompt:
        if not words.isdecimal() or int(words) >= classes:
            raise UserError(
                f"prompt {words!r}: this model draws classes; give ids from 0 to {classes - 1} by "
                "--class_labels"
            )
        return PaddedPrompt(table[int(words)][None], table[-1:])

    return PromptEncoder(encode, 0, num_codes, classes)
