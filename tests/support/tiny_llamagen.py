"""Tiny random LlamaGen checkpoints in both published layouts, with VQ model, text encoder and drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor

from models.codecs.vq import VQConfig, VQModel
from models.codecs.vq16 import published_names
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.layouts.llamagen import decoder_config, drafter_config
from models.layouts.llamagen_prompts import CaptionProjector
from models.llama_names import decoder_names, drafter_names, original_names, scatter
from tests.support.tiny import taught

CODES, FEATURES, ROWS, CLASSES = 64, 24, 12, 7
WORDS = "<pad> </s> <unk> a red blue heart pizza cat face sun with hat on the sea".split()
FIELDS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": CODES, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    "rope_base": 10000, "block_size": 16, "cls_token_num": ROWS, "input_type": "t2i", "num_classes": CLASSES,
    "caption_dim": FEATURES, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
VQ = VQConfig(32, (1, 1), 1, 8, 32, CODES, 32, (16,))


def build(
    folder: Path, seed: int = 0, wrapper: str | None = None, vq_config: VQConfig = VQ, **changes: object
) -> Path:
    """Writes a checkpoint with all files that belong to it, and returns the value of --model_path.

    wrapper: None writes the HF-style folder; otherwise a .pt holds the weights under this key, or without a
    key if it is "". changes: fields that differ from FIELDS; cls_token_num 1 makes the model
    class-conditional.
    """
    torch.manual_seed(seed)
    fields = {**FIELDS, **changes}
    config = decoder_config(fields)
    folder.mkdir(parents=True)
    decoder, of_classes = Decoder(config), fields["cls_token_num"] == 1
    with torch.no_grad():
        decoder.head.weight.mul_(12)
    names = decoder_names(config) if wrapper is None else original_names(config)
    state = scatter(decoder.state_dict(), names, config)
    table = torch.randn(CLASSES + 1, config.hidden_size)
    conditioner: Mapping[str, Tensor] = {"embedding_table.weight": table}
    if not of_classes:
        project = CaptionProjector(config.raster_start, FEATURES, config.hidden_size)
        torch.nn.init.normal_(project.uncond_embedding)
        conditioner = project.state_dict()
    start = "cls_embedding." if wrapper is not None else "model.cls_embedding."
    state |= {start + name: tensor for name, tensor in conditioner.items()}
    path = _write(folder, fields, state, wrapper)
    vq = VQModel(vq_config)
    torch.nn.init.normal_(vq.quantize.embedding.weight)
    names = published_names(vq_config)
    kind = "c2i" if of_classes else "t2i"
    published = {names[name]: tensor for name, tensor in vq.state_dict().items()}
    torch.save(
        {"model": published | {"quantize.codebook_used": torch.zeros(8)}}, folder / f"vq_ds16_{kind}.pt"
    )
    text_encoder(folder / "t5" / "flan-t5-xl", FEATURES)
    _drafter(folder / "drafter", decoder, fields)
    return path


classes = partial(build, wrapper="model", cls_token_num=1)
lone_file = partial(build, wrapper="")
second_stage = partial(build, block_size=1024, input_type="t2i2")


def _write(
    folder: Path, fields: Mapping[str, object], state: Mapping[str, Tensor], wrapper: str | None
) -> Path:
    """Writes the target's file, and its configuration if the layout has one."""
    state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    if wrapper is None:
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    known = {"n_head": fields["num_attention_heads"], "block_size": fields["block_size"]}
    (folder / "config.json").write_text(json.dumps(known))
    torch.save({wrapper: state} if wrapper else state, folder / "t2i.pt")
    return folder / "t2i.pt"


def text_encoder(folder: Path, width: int) -> None:
    """Writes a random T5 encoder and a tokenizer of WORDS."""
    from transformers import T5Config, T5EncoderModel

    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = T5Config(
        vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    T5EncoderModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def _drafter(folder: Path, decoder: Decoder, fields: Mapping[str, object]) -> None:
    """Writes a drafter whose layer is the target's last one, as a .bin, with an input projection without
    bias."""
    drafter_fields = {**fields, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    # The published drafters derive these fields from input_type.
    del drafter_fields["block_size"], drafter_fields["cls_token_num"]
    config = drafter_config(drafter_fields, decoder.config)
    net = taught(DrafterNet(config, bias=False), decoder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(drafter_fields))
    state = scatter(net.state_dict(), drafter_names(config, bias=False), config)
    torch.save(state, folder / "pytorch_model.bin")
