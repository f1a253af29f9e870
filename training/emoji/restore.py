"""Put an exported checkpoint back into a work folder, so that its tokenizer and target go on being trained.

The optimisers start anew, and weights have been rounded to bfloat16. Pictures, captions and text vocabulary
are no part of a checkpoint: `data` and `bpe` make them again, byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adt_tree.errors import UserError
from models.checkpoint.files import replacing
from models.checkpoint.weights import read_weights
from models.codecs.vq import VQConfig
from models.layouts.llama import decoder_names, gather
from models.transformer import DecoderConfig
from training.emoji.codes import digest
from training.emoji.target import STABLE
from training.emoji.tokenizer import Tokenizer, load_exported
from training.loop import save_checkpoint

STATE = "training_state.safetensors"  # in the exported folder: what a resume needs and decoding does not
TOKENIZER = ("config", "rate", "step", "drawn", "spent_s")
TARGET = ("config", "step", "drawn", "pictures", "spent_s")


def write_state(folder: Path, tokenizer: dict, target: dict) -> None:
    """Keep the weights of the codes and the counters of tokenizer.pt and target.pt in an exported folder."""
    kept = {
        "tokenizer": {name: tokenizer[name] for name in TOKENIZER},
        "target": {name: target[name] for name in TARGET},
    }
    with replacing(folder / STATE) as part:
        save_file({"count": tokenizer["book"]["count"]}, part, {"kept": json.dumps(kept)})


def run(args: Any) -> None:
    """Write tokenizer.pt and target.pt. UserError if the work folder has one, or the checkpoint no state."""
    work, folder = Path(args.work_dir), Path(args.start)
    for name in ("tokenizer.pt", STABLE):
        if (work / name).exists():
            raise UserError(f"{work} holds a {name}: remove it, or give another --work_dir")
    if not (folder / STATE).exists():
        raise UserError(f"{folder} holds no {STATE}: give a folder that `train_emoji export` wrote")
    with safe_open(folder / STATE, "pt") as file:
        count, kept = file.get_tensor("count"), json.loads(file.metadata()["kept"])
    config = kept["tokenizer"]["config"]
    tokenizer = Tokenizer(VQConfig(**config), kept["tokenizer"]["rate"], torch.device("cpu"))
    load_exported(tokenizer.model, folder)
    tokenizer.book.load_state_dict({"count": count, "total": tokenizer.book.weight * count[:, None]})
    saved = {"model": tokenizer.model.state_dict(), "book": tokenizer.book.state_dict(), **kept["tokenizer"]}
    work.mkdir(parents=True, exist_ok=True)
    save_checkpoint(work / "tokenizer.pt", saved)
    weights = read_weights(folder).placed(torch.device("cpu"), torch.float32)
    shape = DecoderConfig(**kept["target"]["config"])
    decoder = gather(weights, decoder_names(shape), shape)
    begins = {"codes": digest(tokenizer), "decay_from": None, "fresh_from": kept["target"]["step"]}
    save_checkpoint(work / STABLE, {"model": decoder, **begins, **kept["target"]})
    print(json.dumps({"written": [str(work / "tokenizer.pt"), str(work / STABLE)], **kept["target"]}))
