"""Tiny random Emu3 checkpoints, written by transformers' own save_pretrained, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers

from models.layouts.emu3 import NEGATIVE
from tests.tiny import bytes_tokenizer

CODES, SIZE = 64, 8  # SIZE: pixels along the side of a square of 4 x 4 codes
PAD, BEGIN, END = "<|endoftext|>", "<|extra_203|>", "<|extra_204|>"
IMAGE_START, IMAGE_END, IMAGE_TOKEN = "<|image start|>", "<|image end|>", "<|image token|>"
ROW_END, FRAME_END = "<|extra_200|>", "<|extra_201|>"


def vocabulary() -> dict[str, int]:
    """Bytes, specials, the words of the negative prompt, then image tokens."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), PAD, "<image>", ROW_END, FRAME_END, BEGIN, END]
    names += [IMAGE_START, IMAGE_END, IMAGE_TOKEN, *dict.fromkeys(NEGATIVE.split())]
    names += [f"<|visual token {code:06d}|>" for code in range(CODES)]
    return {name: index for index, name in enumerate(names)}


def tokenizer() -> Any:
    """Every name that is no byte is a special token."""
    from transformers import PreTrainedTokenizerFast

    words = vocabulary()
    own = bytes_tokenizer(words)
    own.add_special_tokens([AddedToken(name, special=True) for name in words if len(name) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=BEGIN, eos_token=END, pad_token=PAD,
        extra_special_tokens={
            "image_token": "<image>", "boi_token": IMAGE_START, "eoi_token": IMAGE_END,
            "image_wrapper_token": IMAGE_TOKEN, "eof_token": FRAME_END,
        },
    )  # fmt: skip


def config(width: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 4) -> Any:
    """An Emu3Config of a tiny model, cells of 2 x 2 pixels."""
    from transformers import Emu3Config, Emu3VQVAEConfig

    words = vocabulary()
    return Emu3Config(
        text_config={
            "vocab_size": len(words), "hidden_size": width, "intermediate_size": 3 * width // 2,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "max_position_embeddings": 1024, "pad_token_id": words[PAD], "bos_token_id": words[BEGIN],
            "eos_token_id": words[END], "attention_dropout": 0.0,
        },
        vq_config=Emu3VQVAEConfig(
            codebook_size=CODES, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1,
            hidden_size=32, attn_resolutions=[1],
        ),
        vocabulary_map=words,
    )  # fmt: skip


def build(folder: Path, seed: int = 0, **changes: int) -> Path:
    """Write a checkpoint with its tokenizer; changes: of config(). Weights are drawn wide, so that logits are
    apart."""
    from transformers import Emu3ForConditionalGeneration

    torch.manual_seed(seed)
    model: Any = Emu3ForConditionalGeneration(config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vqmodel" not in name:
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15 if "layers" in name else 0.5)
                else:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
