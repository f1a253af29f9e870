"""Write the trained parts as a checkpoint in the Hugging Face Chameleon layout, with model card, licences."""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.chameleon import to_chameleon
from models.files import replacing
from models.transformer import DecoderConfig
from training.emoji.bpe import Layout, image_token
from training.emoji.data import sha256

SHARD_BYTES = 16_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji export`."""
    parser.add_argument("--work_dir", default="data/emoji", help="folder that the training stages filled")
    parser.add_argument("--out", default="ckpts/emoji", help="folder of the checkpoint")
    parser.add_argument(
        "--device_name", default="2 CPU cores", help="words of the model card for the machine"
    )
    parser.add_argument(
        "--history",
        default="Every stage ran in one go with its defaults.",
        help="words of the model card on how this training differed from the stages' defaults",
    )
    parser.add_argument(
        "--date", default=date.today().isoformat(), help="date of the training run, for the model card"
    )


def vocabulary_map(num_codes: int, vocab: dict[str, int]) -> dict[str, int]:
    """Token name -> id as config.json has it: the image placeholder is called <image> there."""
    layout = Layout(num_codes)
    named = {name: index for name, index in vocab.items() if index != layout.placeholder}
    return dict(sorted((named | {"<image>": layout.placeholder}).items()))


def model_config(shape: DecoderConfig, vq: dict, vocab: dict[str, int]) -> dict:
    """Fields of a ChameleonConfig as transformers 5 writes it."""
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


def write_shards(state: dict[str, Tensor], folder: Path) -> list[Path]:
    """Write model.safetensors, or shards of at most 16 MB with their index; earlier weights are removed."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        with replacing(folder / name) as part:
            save_file(shard, part, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return [folder / name for name in names]


def model_card(facts: dict, licences: list[dict]) -> str:
    """README.md of the checkpoint."""
    sources = "\n".join(
        f"| {row['style']} | {row['title']} ([{row['package']}]({row['source']})) | {row['author']} "
        f"| [{row['licence']}]({row['licence_url']}) |"
        for row in licences
    )
    return CARD.format(sources=sources, **facts)


CARD = """# emoji: the embedded model of ADT-Tree

A small text-to-image model of exactly the Chameleon shape (`ChameleonForConditionalGeneration`): {image_size} px,
{grid} x {grid} codes of {num_codes}. It exists so that every path of this repository runs, is tested and is measured
without a download. It draws emoji-like pictures and nothing else.

Prompts: `<style> emoji of <name>[, keyword, keyword]`, style one of {styles}. Example: `noto emoji of red heart`.

## Data and licences
{num_images} pictures: {num_names} names in {num_styles} styles, {image_size} px on white. {num_held_out} (style, name)
pairs were kept out of training; each of those names was seen in the other styles.

| style | source | author | licence |
|---|---|---|---|
{sources}

Twemoji graphics: copyright Twitter, Inc and other contributors, licensed under CC-BY 4.0; they were rasterised and
used for training, pictures the model makes may resemble them. `licences.json` holds this table, `checksums.json`
the SHA-256 of the data built and of every file of this folder that holds weights.

## Sizes
Target: {layers} layers, hidden {hidden}, {heads} heads, MLP {intermediate}, vocabulary {vocab_size},
{target_params:.2f} M parameters. Drafter: one such layer and its input projection. VQGAN: {vq_params:.2f} M parameters, codebook {num_codes} x {embed_dim}. bfloat16.

## Figures (device: {device_name}; {date})
| figure | value | command |
|---|---|---|
| VQ reconstruction, seen images | {train_psnr_db:.2f} dB PSNR, {train_l1_levels:.2f} levels of 255 mean error | `main.py train_emoji tokenizer` ({tokenizer_steps} steps, {tokenizer_minutes:.0f} min) |
| VQ reconstruction, held-out images | {held_out_psnr_db:.2f} dB PSNR, {held_out_l1_levels:.2f} levels | the same |
| codes used | {codes_used} of {num_codes} | the same |
| target loss, seen pairs, law at guidance {cfg:g} | {seen:.3f} nats a code | `main.py train_emoji target` ({target_steps} steps, {target_minutes:.0f} min) |
| target loss, held-out pairs | {held_out:.3f} nats a code | the same |
{drafter}

The target's losses are of the law at that guidance scale, which is what training fits, at the last step; the shipped weights are a running average near its end. The
drafter's agreement is of its shipped average.
{history}

## Limits
Trained for {target_minutes:.0f} minutes ({device_name}). Words outside the training captions mean nothing to it;
held-out pairs come out worse than seen ones; fine detail is lost in the {grid} x {grid} grid. Persons and flags are
not in the data, letters only as parts of things. Not for use as a picture source: it is an instrument for measuring
decoders.
"""  # noqa: E501


def drafter_lines(work: Path) -> str:
    """Rows of the model card on the drafter: agreement is the sum over codes of min(p, q), guided laws."""
    path = work / "drafter" / "log.jsonl"
    if not path.exists():
        return "| drafter | not trained yet | `main.py train_drafter --config configs/emoji-drafter.yaml` |"
    last = json.loads(path.read_text().splitlines()[-1])
    levels = last["agreement"]
    shown = ", ".join(f"{value:.3f}" for value in levels)
    shards = json.loads((work / "drafter_data" / "index.json").read_text())["shards"]
    images = sum(len(shard["images"]) for shard in shards)
    return (
        f"| drafter, agreement with the target at tree levels 1 to {len(levels)} | {shown} | "
        f"`main.py generate_train_data`, `main.py train_drafter --config configs/emoji-drafter.yaml` "
        f"({images} images, {last['step']} steps, {last['spent_s'] / 60:.0f} min) |"
    )


def collect_facts(work: Path, target: dict, tokenizer: dict, args: argparse.Namespace) -> dict:
    """Values of the model card, all read from what the stages wrote."""
    rows = [json.loads(line) for line in (work / "captions.jsonl").read_text().splitlines()]
    report = json.loads((work / "tokenizer_report.json").read_text())
    last = json.loads((work / "losses_target.jsonl").read_text().splitlines()[-1])
    vq, shape = tokenizer["config"], target["config"]
    return {
        **report, "seen": last["seen"], "held_out": last["held_out"], "target_steps": target["step"],
        "cfg": target["cfg"],
        "target_minutes": target["spent_s"] / 60, "tokenizer_steps": report["steps"],
        "tokenizer_minutes": report["spent_s"] / 60, "device_name": args.device_name,
        "history": args.history, "date": args.date,
        "drafter": drafter_lines(work),
        "image_size": vq["resolution"], "num_codes": vq["num_embeddings"], "embed_dim": vq["embed_dim"],
        "grid": vq["resolution"] >> (len(vq["channel_multiplier"]) - 1),
        "styles": ", ".join(f"`{style}`" for style in dict.fromkeys(row["style"] for row in rows)),
        "num_styles": len({row["style"] for row in rows}), "num_images": len(rows),
        "num_names": len({row["name"] for row in rows}),
        "num_held_out": sum(row["split"] == "held_out" for row in rows),
        "layers": shape["num_layers"], "hidden": shape["hidden_size"], "heads": shape["num_heads"],
        "intermediate": shape["intermediate_size"], "vocab_size": shape["vocab_size"],
        "target_params": sum(t.numel() for t in target["average"].values()) / 1e6,
        "vq_params": sum(t.numel() for t in tokenizer["model"].values()) / 1e6,
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Assemble the checkpoint folder from the stages' files."""
    work, out = Path(args.work_dir), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    target = torch.load(work / "target.pt", map_location="cpu", weights_only=True)
    tokenizer = torch.load(work / "tokenizer.pt", map_location="cpu", weights_only=True)
    shape = DecoderConfig(**target["config"])
    state = to_chameleon(target["average"], shape)
    state |= {f"model.vqmodel.{name}": tensor for name, tensor in tokenizer["model"].items()}
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    shards = write_shards(state, out)
    text = (work / "text_tokenizer.json").read_text()
    vocab = json.loads(text)["model"]["vocab"]
    if vocab.get(image_token(tokenizer["config"]["num_embeddings"] - 1)) is None:
        raise ValueError("text_tokenizer.json has fewer image codes than the VQGAN: run the bpe stage again")
    (out / "text_tokenizer.json").write_text(text)
    (out / "config.json").write_text(
        json.dumps(model_config(shape, tokenizer["config"], vocab), indent=1) + "\n"
    )
    generation = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "use_cache": True}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    licences = json.loads((work / "licences.json").read_text())
    (out / "licences.json").write_text(json.dumps(licences, indent=1) + "\n")
    (out / "README.md").write_text(model_card(collect_facts(work, target, tokenizer, args), licences))
    sums = json.loads((work / "checksums.json").read_text())
    files = [*shards, *sorted(out.glob("drafter/*")), out / "text_tokenizer.json", out / "config.json"]
    sums |= {path.relative_to(out).as_posix(): sha256(path) for path in files}
    (out / "checksums.json").write_text(json.dumps(sums, indent=1) + "\n")
    print(
        json.dumps(
            {"out": str(out), "bytes": sum(path.stat().st_size for path in shards), "shards": len(shards)}
        )
    )
