"""Writes the trained parts as a checkpoint in transformers' Chameleon layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from adt_tree.errors import UserError
from eval.metrics.recogniser import GALLERY
from models.checkpoint.files import read_json, write_json
from models.decoder.config import DecoderConfig
from models.llama_names import decoder_names, scatter
from recipes.emoji.bpe import Layout, image_token
from recipes.emoji.data import sha256
from recipes.emoji.pictures import Pictures
from recipes.emoji.recognise import write_views
from recipes.emoji.restore import STATE, write_state
from recipes.emoji.stage import StageOptions, main, saved_state
from recipes.emoji.tokenizer import VQ
from storage.command_line import declare, option

SHARD_BYTES = 16_000_000


@declare("checkpoint")
class Options(StageOptions):
    """Options of the export."""

    out: str = option("folder of the checkpoint", "ckpts/emoji")


def vocabulary_map(num_codes: int, vocab: dict[str, int]) -> dict[str, int]:
    """Returns the map from tokens to ids for config.json, where the image placeholder is called <image>."""
    layout = Layout(num_codes)
    others = {name: index for name, index in vocab.items() if index != layout.placeholder}
    return dict(sorted((others | {"<image>": layout.placeholder}).items()))


def model_config(shape: DecoderConfig, vq: dict, vocab: dict[str, int]) -> dict:
    """Returns config.json of a ChameleonConfig as transformers 5 writes it."""
    num_codes = vq["num_embeddings"]
    vq_config = {**vq, "channel_multiplier": list(vq["channel_multiplier"]), "dropout": 0.0,
                 "double_latent": False, "attn_resolutions": list(vq["attn_resolutions"]) or None,
                 "model_type": "chameleon_vqgan"}  # fmt: skip
    return {
        "architectures": ["ChameleonForConditionalGeneration"], "model_type": "chameleon",
        "dtype": "bfloat16", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu", "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "model_parallel_size": 1,
        "swin_norm": False, "tie_word_embeddings": False, "use_cache": True, "initializer_range": 0.02,
        "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "image_token_id": Layout(num_codes).placeholder,
        "vocabulary_map": vocabulary_map(num_codes, vocab), "vq_config": vq_config,
    }  # fmt: skip


def write_shards(state: dict[str, Tensor], out: Path) -> None:
    """Replaces a folder's weights once all new shards are written. Raises UserError if the disk is full."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        try:
            save_torch_state_dict(state, folder, max_shard_size=SHARD_BYTES)
        except SafetensorError as error:
            raise UserError(f"--out {out}: the weights cannot be written ({error}); make room") from None
        for old in out.glob("model*.safetensors*"):
            old.unlink()
        for path in Path(folder).iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read
            path.replace(out / path.name)


def run(options: Options) -> None:
    """Writes the checkpoint from the files of the other stages."""
    work, out = Path(options.work_dir), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = saved_state(work, "target"), saved_state(work, "tokenizer")
    shape = DecoderConfig(**target["config"])
    state = scatter(target["model"], decoder_names(shape), shape)
    state |= {f"{VQ}{name}": tensor for name, tensor in tokenizer["model"].items()}
    state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    write_shards(state, out)
    shards = sorted(out.glob("model*.safetensors"))
    write_state(out, tokenizer, target)
    vocab = read_json(work / "text_tokenizer.json")["model"]["vocab"]
    if image_token(tokenizer["config"]["num_embeddings"] - 1) not in vocab:
        raise ValueError("text_tokenizer.json has fewer image codes than the VQGAN: run the bpe stage again")
    for name in ("text_tokenizer.json", "licences.json"):
        shutil.copyfile(work / name, out / name)
    write_json(out / "config.json", model_config(shape, tokenizer["config"], vocab))
    generation = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "use_cache": True}
    write_json(out / "generation_config.json", generation)
    write_views(Pictures(work), out / GALLERY)
    sums = read_json(work / "checksums.json")
    others = (out / name for name in (STATE, GALLERY, "text_tokenizer.json", "config.json"))
    files = [*shards, *sorted(out.glob("drafter/*")), *others]
    sums |= {path.relative_to(out).as_posix(): sha256(path) for path in files}
    write_json(out / "checksums.json", sums)
    size = sum(path.stat().st_size for path in shards)
    print(json.dumps({"out": str(out), "bytes": size, "shards": len(shards)}))


if __name__ == "__main__":
    main(Options, run, __doc__)
