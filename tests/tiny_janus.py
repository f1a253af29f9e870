"""Tiny random Janus checkpoints, written by transformers' own save_pretrained, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers, processors

from tests.tiny import bytes_tokenizer

CODES, GRID = 64, 4
BEGIN, END, PAD, IMAGE = "<bos>", "<eos>", "<pad>", "<begin_of_image>"
SPECIAL = [PAD, BEGIN, END, "<unk>", IMAGE, "<end_of_image>", "<image_placeholder>"]
# What the published template makes of one user's text and the opening of an answer.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|User|>: {% endif %}"
    "{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


def tokenizer() -> Any:
    """Specials, then bytes; a text begins with BEGIN."""
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    own = bytes_tokenizer(words, unk_token="<unk>")
    own.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=BEGIN, eos_token=END, pad_token=PAD, unk_token="<unk>",
        extra_special_tokens={"boi_token": IMAGE, "eoi_token": SPECIAL[5], "image_token": SPECIAL[6]},
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def config(width: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 4, aligner: int = 2) -> Any:
    """A JanusConfig of a tiny model; aligner: layers of the MLP that codes enter by."""
    from transformers import JanusConfig, JanusVisionConfig, JanusVQVAEConfig, LlamaConfig

    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=300, hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
        vision_config=JanusVisionConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=2 * GRID, patch_size=2,
            projection_dim=width, num_image_tokens=GRID * GRID,
        ),
        vq_config=JanusVQVAEConfig(
            embed_dim=8, num_embeddings=CODES, latent_channels=32, base_channels=32, num_res_blocks=1,
            channel_multiplier=[1, 1], projection_dim=width, num_hidden_layers=aligner,
            image_token_embed_dim=width,
        ),
        image_token_id=6,
    )  # fmt: skip


def build(folder: Path, seed: int = 0, **changes: int) -> Path:
    """Write a checkpoint with tokenizer and chat template; changes: of config(). Weights are drawn wide, so
    that logits are apart and every part counts."""
    from transformers import JanusForConditionalGeneration

    torch.manual_seed(seed)
    model: Any = JanusForConditionalGeneration(config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("model.language_model", "model.generation_")) and parameter.dim() > 1:
                parameter.normal_(std=0.15 if "layers" in name else 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.model.vqmodel.quantize.embedding.weight.normal_()
    model.generation_config._from_model_config = False  # as published: else what follows is not read back
    model.generation_config.generation_kwargs = {"boi_token_id": SPECIAL.index(IMAGE)}
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
