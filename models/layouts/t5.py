"""LlamaGen's text encoder: a T5 encoder from transformers, loaded when first asked and freed on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.folder import read_config, read_tokenizer
from models.errors import CheckpointError, reason
from models.layouts.captions import clean
from models.tools.torchvision_guard import mend_torchvision


class T5Text:
    """Texts -> features [n, C], the end-of-text token included and no padding.

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
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        mend_torchvision()
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
