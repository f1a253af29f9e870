"""Tiny random GLM-Image, written by transformers' own save_pretrained in the folders of the published
repository, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from tests.support.tiny import bytes_tokenizer
from tests.support.tiny_transformers import LETTERS, write

CODES, MORE = 64, 16  # codes, and rows of the head behind them
START, END = 0, 1  # image start and end, counted behind the codes
GRID_START, GRID_END, SOURCE, PAD = "<sop>", "<eop>", "<|image|>", "<|endoftext|>"
# Other words than in the published template, in the same form: a role before each text, and at the end the
# role of the answer.
TEMPLATE = (
    "[gMASK]{% for message in messages %}<|user|>\n{% for part in message['content'] %}{{ part['text'] }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MODEL, PROCESSOR = "vision_language_encoder", "processor"


def vocabulary(codes: int = CODES) -> dict[str, int]:
    """Returns the image tokens, then the special tokens and the bytes."""
    images = [f"<|dit_token_{n}|>" for n in range(codes + MORE)]
    names = [*images, PAD, GRID_START, GRID_END, SOURCE, "[gMASK]", "<|user|>", "<|assistant|>", *LETTERS]
    return {name: index for index, name in enumerate(names)}


def config(
    width: int, heads: int, kv_heads: int, factor: float, sections: Sequence[int], codes: int, layers: int
) -> Any:
    """Returns transformers' configuration."""
    import transformers as hf

    words = vocabulary(codes)
    rope = {
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor,
        "mrope_section": list(sections),
    }  # fmt: skip
    text = {
        "vocab_size": len(words), "hidden_size": width, "intermediate_size": 3 * width // 2,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096, "rope_parameters": rope, "pad_token_id": words[PAD],
        "eos_token_id": codes + END, "vision_vocab_size": codes + MORE,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "image_size": 32,
        "patch_size": 16,
    }  # fmt: skip
    return hf.GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config={"embed_dim": 8, "num_embeddings": codes, "latent_channels": 16},
        image_token_id=words[SOURCE],
        image_start_token_id=codes + START,
        image_end_token_id=codes + END,
    )


def build(
    root: Path,
    width: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    factor: float = 0.5,
    sections: Sequence[int] = (1, 3, 4),
    codes: int = CODES,
    layers: int = 2,
) -> Path:
    """Writes the repository; returns the model's folder in it. generation_config.json has other values than
    the family's defaults."""
    import transformers as hf

    torch.manual_seed(0)
    model_config = config(width, heads, kv_heads, factor, sections, codes, layers)
    model: Any = hf.GlmImageForConditionalGeneration(model_config).eval()
    torch.nn.init.normal_(model.model.vqmodel.quantize.embedding.weight)
    model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.7)
    words = vocabulary(codes)
    byte_tokenizer = bytes_tokenizer(words)
    byte_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in words if len(name) > 1])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, bos_token=f"<|dit_token_{codes + START}|>", pad_token=PAD,
        extra_special_tokens={
            "image_token": SOURCE, "grid_bos_token": GRID_START, "grid_eos_token": GRID_END,
        },
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    write(root / MODEL, model)
    tokenizer.save_pretrained(root / PROCESSOR)
    return root / MODEL
