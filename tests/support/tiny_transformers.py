"""Tiny random Janus-Pro, Emu3, SimpleAR and Liquid, written by transformers' own save_pretrained, with
tokenizers of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers, processors

from models.codecs.vq import VQConfig, VQModel
from models.layouts.emu3 import NEGATIVE
from models.layouts.simplear import NUM_CODES
from tests.support import published, tiny
from tests.support.tiny import bytes_tokenizer

CODES, GRID = 64, 4
SIZE = 2 * GRID  # pixels along the side of a square image
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
JANUS_BEGIN, BEGIN_OF_IMAGE = "<bos>", "<begin_of_image>"
JANUS_SPECIAL = [
    "<pad>",
    JANUS_BEGIN,
    "<eos>",
    "<unk>",
    BEGIN_OF_IMAGE,
    "<end_of_image>",
    "<image_placeholder>",
]
# The published template, reduced to one text of a user and the opening of an answer.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|User|>: {% endif %}"
    "{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
PAD, BEGIN, END = "<|endoftext|>", "<|extra_203|>", "<|extra_204|>"
IMAGE_START, IMAGE_END, IMAGE_TOKEN = "<|image start|>", "<|image end|>", "<|image token|>"
ROW_END, FRAME_END = "<|extra_200|>", "<|extra_201|>"
EMU3_SPECIAL = [PAD, "<image>", ROW_END, FRAME_END, BEGIN, END, IMAGE_START, IMAGE_END, IMAGE_TOKEN]

# What the names of text models' tensors begin with.
TEXT = (
    "model.language_model", "model.text_model", "model.generation_", "lm_head", "model.layers",
    "model.embed_tokens",
)  # fmt: skip
T2I, SOI = "<|t2i|>", "<|soi|>"
SIMPLEAR_TEXT = [*LETTERS, PAD, T2I, SOI]  # without the codes, as of Liquid below
LIQUID_TEXT = ["<pad>", "<eos>", JANUS_BEGIN, "<unk>", "<boi>", "<eoi>", *LETTERS]


def _numbered(names: list[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


def emu3_vocabulary() -> dict[str, int]:
    """Returns the bytes, the special tokens, the words of the negative prompt, and the image tokens."""
    images = [f"<|visual token {code:06d}|>" for code in range(CODES)]
    return _numbered([*LETTERS, *EMU3_SPECIAL, *dict.fromkeys(NEGATIVE.split()), *images])


def _shape(vocabulary: int, width: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """Returns the fields of a Llama's configuration."""
    return {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width // 2,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
    }  # fmt: skip


@torch.no_grad()
def write(folder: Path, model: Any, ends: float = 0.5) -> None:
    """Writes the model. Its weights are large, so that logits differ clearly and every part has an effect.
    ends: standard deviation of embeddings and head."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif "norm" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif name.startswith(TEXT):
            parameter.normal_(std=0.15 if "layers" in name else ends)
    model.save_pretrained(folder)


def _write(folder: Path, model: Any, tokenizer: Any, ends: float = 0.5) -> Path:
    """Writes the checkpoint with its tokenizer."""
    write(folder, model, ends)
    tokenizer.save_pretrained(folder)
    return folder


def janus(folder: Path, width: int = 32, layers: int = 2, kv_heads: int = 4, aligner: int = 2) -> Path:
    """Writes Janus-Pro with a chat template. aligner: number of layers of the MLP through which codes
    enter."""
    import transformers as hf

    torch.manual_seed(0)
    text = hf.LlamaConfig(
        **_shape(300, width, layers, kv_heads), bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    vision = hf.JanusVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=SIZE, patch_size=2,
        projection_dim=width, num_image_tokens=GRID * GRID,
    )  # fmt: skip
    vq = hf.JanusVQVAEConfig(
        embed_dim=8, num_embeddings=CODES, latent_channels=32, base_channels=32, num_res_blocks=1,
        channel_multiplier=[1, 1], projection_dim=width, num_hidden_layers=aligner,
        image_token_embed_dim=width,
    )  # fmt: skip
    config = hf.JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=6)
    model: Any = hf.JanusForConditionalGeneration(config).eval()
    torch.nn.init.normal_(model.model.vqmodel.quantize.embedding.weight)
    # As published; otherwise the fields below are not read back.
    model.generation_config._from_model_config = False
    model.generation_config.generation_kwargs = {"boi_token_id": JANUS_SPECIAL.index(BEGIN_OF_IMAGE)}
    byte_tokenizer = bytes_tokenizer(_numbered([*JANUS_SPECIAL, *LETTERS]), unk_token="<unk>")
    byte_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{JANUS_BEGIN} $A", special_tokens=[(JANUS_BEGIN, 1)]
    )
    pad, begin, end, unknown, *image = JANUS_SPECIAL
    tokenizer: Any = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, bos_token=begin, eos_token=end, pad_token=pad, unk_token=unknown,
        extra_special_tokens=dict(zip(("boi_token", "eoi_token", "image_token"), image, strict=True)),
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return _write(folder, model, tokenizer)


def emu3(folder: Path, width: int = 32, layers: int = 2, kv_heads: int = 4) -> Path:
    """Writes Emu3. Every name in its vocabulary that is not a byte is a special token."""
    import transformers as hf

    torch.manual_seed(0)
    words = emu3_vocabulary()
    ids = {"pad_token_id": words[PAD], "bos_token_id": words[BEGIN], "eos_token_id": words[END]}
    vq = hf.Emu3VQVAEConfig(
        codebook_size=CODES, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, hidden_size=32,
        attn_resolutions=[1],
    )  # fmt: skip
    text = _shape(len(words), width, layers, kv_heads) | ids | {"attention_dropout": 0.0}
    config = hf.Emu3Config(text_config=text, vq_config=vq, vocabulary_map=words)
    byte_tokenizer = bytes_tokenizer(words)
    byte_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in words if len(name) > 1])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD,
        extra_special_tokens={
            "image_token": "<image>", "boi_token": IMAGE_START, "eoi_token": IMAGE_END,
            "image_wrapper_token": IMAGE_TOKEN, "eof_token": FRAME_END,
        },
    )  # fmt: skip
    return _write(folder, hf.Emu3ForConditionalGeneration(config).eval(), tokenizer)


def simplear(folder: Path, width: int = 32, layers: int = 2, kv_heads: int = 4, tied: bool = True) -> Path:
    """Writes SimpleAR, without a decoder of pixels."""
    import transformers as hf

    torch.manual_seed(0)
    words = _numbered(SIMPLEAR_TEXT)
    config = hf.Qwen2Config(
        **_shape(len(words) + NUM_CODES, width, layers, kv_heads), tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    byte_tokenizer = bytes_tokenizer(words)
    byte_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (PAD, T2I, SOI)])
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, pad_token=PAD, eos_token=PAD)
    return _write(folder, hf.Qwen2ForCausalLM(config).eval(), tokenizer)


def liquid(folder: Path, width: int = 32, layers: int = 2, kv_heads: int = 4, head_size: int = 12) -> Path:
    """Writes Liquid, and Meta's VQGAN beside it. Its heads are not width / 4 large, and config.json does
    not say that its head is tied."""
    import transformers as hf

    torch.manual_seed(0)
    words = _numbered(LIQUID_TEXT)
    config = hf.GemmaConfig(**_shape(len(words) + CODES, width, layers, kv_heads), head_dim=head_size)
    byte_tokenizer = bytes_tokenizer(words, unk_token="<unk>")
    byte_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in words if len(name) > 1])
    byte_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{JANUS_BEGIN} $A", special_tokens=[(JANUS_BEGIN, words[JANUS_BEGIN])]
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token=JANUS_BEGIN,
        unk_token="<unk>",
    )  # fmt: skip
    _write(folder, hf.GemmaForCausalLM(config).eval(), tokenizer, ends=0.07)  # its embeddings are scaled
    published.edit(folder / "config.json", lambda fields: fields.pop("tie_word_embeddings", None))
    vqgan = VQModel(VQConfig.from_hf(tiny.VQ))
    torch.nn.init.normal_(vqgan.quantize.embedding.weight)
    published.write_vqgan(vqgan.state_dict(), folder.parent / "chameleon" / "tokenizer")
    return folder
