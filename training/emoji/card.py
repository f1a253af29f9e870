"""Writes README.md of the embedded checkpoint from the files that the stages wrote into the work folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.emoji.data import read_captions
from training.emoji.pictures import DEGREES, SCALE

NOT_MEASURED = "not measured yet"
NATS, SHARES = "{:.3f} nats a code", "{0[top1]:.0%} ({0[top5]:.0%}) of {0[pictures]}"
MEASURED = {  # name of figures_NAME.json -> the command that writes it; key, label and format of each figure
    "tokenizer": ("`main.py train_emoji measure --of tokenizer`", (
        ("psnr_db", "VQ reconstruction, PSNR", "{:.2f} dB"),
        ("l1_levels", "mean error", "{:.2f} levels of 255"),
        ("code_nats", "entropy of a code", "{:.2f} nats"),
        ("white_nats", "entropy of a white cell's code", "{:.3f} nats"),
        ("white_share", "white cells", "{:.0%}"),
        ("equal_to_left", "codes equal to the one on the left", "{:.0%}"),
        ("codes_used", "codes used", "{}"),
    )),
    "target": ("`main.py train_emoji measure --of target`", (
        ("train", "target loss, pictures it was trained on", NATS),
        ("new", "new placements of trained pairs", NATS),
        ("held_out", "held-out pairs", NATS),
        ("wrong_text", "new placements, wrong name", NATS),
        ("no_text", "new placements, no prompt", NATS),
    )),
    "recognised": ("`main.py train_emoji recognise`", (
        ("generated", "recognised, trained pairs", SHARES),
        ("generated_held_out", "recognised, held-out pairs", SHARES),
        ("originals_through_codes", "recognised, originals through the codes", SHARES),
    )),
}  # fmt: skip

CARD = """# emoji: the embedded model of ADT-Tree

A small text-to-image model of exactly the Chameleon shape (`ChameleonForConditionalGeneration`): {vq[resolution]} px,
{grid} x {grid} codes of {vq[num_embeddings]}. It exists so that every path of this repository runs, is tested and is measured
without a download. It generates emoji-like pictures and nothing else.

Prompts: `<style> emoji of <name>[, keyword, keyword]`, style one of {styles}. Example: `noto emoji of red heart`.

## Data and licences
{num_names} names in {num_styles} styles on white, rendered without end: each picture at a random place, at scale
{scale[0]:g} to {scale[1]:g}, turned by up to {degrees:g} degrees, half of them mirrored where the name allows. The target saw
{target[pictures]:,} pictures, none twice. {num_held_out} (style, name) pairs were kept out of training; each of those names
was seen in the other styles.

| style | source | author | licence |
|---|---|---|---|
{sources}

Twemoji graphics: copyright Twitter, Inc and other contributors, licensed under CC-BY 4.0. They were rasterised and
used for training; pictures that the model generates may resemble them. `licences.json` holds this table, `checksums.json`
the SHA-256 of the training data and of every file of this folder that holds weights.

## Sizes
Target: {shape[num_layers]} layers, hidden {shape[hidden_size]}, {shape[num_heads]} heads, MLP {shape[intermediate_size]}, vocabulary {shape[vocab_size]},
{target_params:.2f} M parameters. Drafter: one such layer, its MLP twice as wide, and its input projection. VQGAN: {vq_params:.2f} M parameters, codebook {vq[num_embeddings]} x {vq[embed_dim]}. bfloat16.

## Figures (device: {args.device_name}; commit {args.commit}; {args.date})
| figure | value | command |
|---|---|---|
{figures}

Except for the loss on trained pictures, figures are measured at placements that were never trained on. A cell is white if all its pixels are at
least 250 of 255. A picture is recognised if the nearest of all {num_pairs} originals under jitter, by EfficientNet-Lite0
features, has the right name (in brackets: if one of the five nearest names is right).
Trained: tokenizer {tokenizer[step]} steps in {tokenizer_minutes:.0f} minutes, target {target[step]} steps in {target_minutes:.0f} minutes. {args.history}

## Limits
Words outside the training captions mean nothing to it. Held-out pairs come out worse than trained ones. Fine detail
is lost in the {grid} x {grid} grid. The data has no persons and no flags, and letters only as parts of things. The model
is an instrument for measuring decoders, not a source of pictures.
"""  # noqa: E501


def measured_rows(work: Path, name: str) -> list[tuple[str, str, str]]:
    """Returns (figure, value, command) for each figure in figures_NAME.json."""
    command, figures = MEASURED[name]
    path = work / f"figures_{name}.json"
    if not path.exists():
        return [(name, NOT_MEASURED, command)]
    values = json.loads(path.read_text())[name]
    if "cfg" in values:
        command += f", T = {values['temperature']:g}, guidance {values['cfg']:g}"
    rows = [(label, text.format(values[key]), "the same") for key, label, text in figures if key in values]
    return [(*rows[0][:2], command), *rows[1:]]


def drafter_rows(work: Path) -> list[tuple[str, str, str]]:
    """Returns (figure, value, command) for the drafter's agreement: sum over codes of min(p, q), guided."""
    path = work / "drafter" / "log.jsonl"
    command = "`main.py train_drafter --config configs/emoji-drafter.yaml`"
    if not path.exists():
        return [("drafter", "not trained yet", command)]
    last = json.loads(path.read_text().splitlines()[-1])
    levels = last["agreement"]
    shards = json.loads((work / "drafter_data" / "index.json").read_text())["shards"]
    images = sum(len(shard["images"]) for shard in shards)
    label = f"drafter, agreement with the target at tree levels 1 to {len(levels)}"
    agreements = ", ".join(f"{value:.3f}" for value in levels)
    cost = f"({images} images, {last['step']} steps, {last['spent_s'] / 60:.0f} min)"
    return [(label, agreements, f"{command} {cost}")]


def model_card(work: Path, target: dict, tokenizer: dict, args: Any) -> str:
    """Returns the text of the model card. target, tokenizer: the checkpoints of these stages."""
    rows = read_captions(work)
    licences = json.loads((work / "licences.json").read_text())
    vq, shape = tokenizer["config"], target["config"]
    figures = [row for name in MEASURED for row in measured_rows(work, name)] + drafter_rows(work)
    sources = [
        f"| {row['style']} | {row['title']} ([{row['package']}]({row['source']})) | {row['author']} "
        f"| [{row['licence']}]({row['licence_url']}) |"
        for row in licences
    ]
    return CARD.format(
        args=args, target=target, tokenizer=tokenizer, vq=vq, shape=shape, scale=SCALE, degrees=DEGREES,
        sources="\n".join(sources), figures="\n".join(f"| {' | '.join(row)} |" for row in figures),
        target_minutes=target["spent_s"] / 60, tokenizer_minutes=tokenizer["spent_s"] / 60,
        grid=vq["resolution"] >> (len(vq["channel_multiplier"]) - 1),
        styles=", ".join(f"`{style}`" for style in dict.fromkeys(row["style"] for row in rows)),
        num_styles=len({row["style"] for row in rows}), num_names=len({row["name"] for row in rows}),
        num_pairs=len(rows), num_held_out=sum(row["split"] == "held_out" for row in rows),
        target_params=sum(t.numel() for t in target["model"].values()) / 1e6,
        vq_params=sum(t.numel() for t in tokenizer["model"].values()) / 1e6,
    )  # fmt: skip
