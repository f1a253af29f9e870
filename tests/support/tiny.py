"""A tiny random checkpoint laid out as the embedded model: 2 layers, 4 x 4 grid, 64 codes, a drafter. Also
tiny dimensions for models without a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from models.codecs.vq import VQConfig, VQModel
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.footprint import Dimensions, published_dimensions
from models.layouts.chameleon import decoder_config
from models.llama_names import decoder_names, drafter_names, scatter

CODES, FIRST_CODE, GRID = 64, 4, 4
VQ = {
    "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "embed_dim": 16,
    "latent_channels": 32, "num_embeddings": CODES, "resolution": 2 * GRID, "attn_resolutions": None,
    "attn_type": "vanilla", "in_channels": 3,
    "double_latent": False, "dropout": 0.0, "initializer_range": 0.02, "model_type": "chameleon_vqgan",
}  # fmt: skip


def tiny_dimensions(**changes: int) -> Dimensions:
    """Returns tiny dimensions in the layout of lumina_mgpt: 4 x 4 codes with row separators, and a drafter.
    changes: fields of Dimensions to replace."""
    published = published_dimensions("lumina_mgpt")
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    small |= {"num_heads": 4, "num_kv_heads": 4}
    decoder = replace(published.decoder, num_layers=2, **small)
    vq = replace(published.vq, num_embeddings=256, embed_dim=8)
    sizes = {"codes": 256, "side": 4 * vq.patch_size, "tokens": 20, "prompt": 12}
    drafter = replace(decoder, num_layers=1)
    return replace(published, decoder=decoder, drafter=drafter, vq=vq, **sizes | changes)


def _image_token(code: int) -> str:
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def vocabulary() -> dict[str, int]:
    """Returns the special tokens, the image tokens from FIRST_CODE on, the begin of image, the separator, and
    the bytes."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *map(_image_token, range(CODES)), "<racm3:break>"]
    names += ["<reserved08706>", "<image>", "<eoss>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {name: index for index, name in enumerate(names)}


def _config() -> dict:
    words = vocabulary()
    return {
        "architectures": ["ChameleonForConditionalGeneration"], "model_type": "chameleon",
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "swin_norm": False, "tie_word_embeddings": False, "model_parallel_size": 1,
        "vocabulary_map": words, "vq_config": VQ,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def _write(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def taught(net: DrafterNet, decoder: Decoder) -> DrafterNet:
    """Returns a drafter whose layer is the target's last one."""
    last, eye = decoder.blocks[-1].state_dict(), torch.eye(decoder.config.hidden_size)
    net.block.load_state_dict({name: last[name] for name in net.block.state_dict()})
    net.embed.load_state_dict(decoder.embed.state_dict())
    net.fc.weight.copy_(torch.cat((0.5 * eye, eye), dim=1))
    return net


def bytes_tokenizer(words: dict[str, int], **special: str) -> Tokenizer:
    """Returns a tokenizer in which every byte is a token. special: options of BPE."""
    tokenizer = Tokenizer(BPE(words, [], **special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def build(folder: Path, **changes: int) -> Path:
    """Writes the checkpoint and its drafter. changes: fields of config.json to replace. Returns the
    folder."""
    torch.manual_seed(0)
    config = _config() | changes
    (folder / "drafter").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    decoder = Decoder(decoder_config(config))
    vq = VQModel(VQConfig.from_hf(VQ))
    torch.nn.init.normal_(vq.quantize.embedding.weight)
    state = scatter(decoder.state_dict(), decoder_names(decoder.config), decoder.config)
    state |= {f"model.vqmodel.{name}": tensor for name, tensor in vq.state_dict().items()}
    state["lm_head.weight"] = 12 * state["lm_head.weight"]  # peaked enough that options matter
    _write(state, folder)
    small = config | {"num_hidden_layers": 1}
    net = taught(DrafterNet(decoder_config(small)), decoder)
    (folder / "drafter" / "config.json").write_text(json.dumps(small))
    _write(scatter(net.state_dict(), drafter_names(net.config, bias=True), net.config), folder / "drafter")
    tokenizer = bytes_tokenizer(vocabulary(), unk_token="<unk>")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "text_tokenizer.json"))
    return folder
