"""Puts an exported checkpoint back into a work folder, to train its tokenizer and target further.

The optimisers begin without history, and the weights have been rounded to bfloat16. Pictures, captions and
text vocabulary are not part of a checkpoint: the stages `data` and `bpe` make them again, byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adt_tree.errors import UserError
from models.checkpoint.files import replacing
from models.checkpoint.weights import read_weights
from models.codecs.vq import VQConfig
from models.decoder.config import DecoderConfig
from models.llama_names import decoder_names, gather
from recipes.emoji.codes import digest
from recipes.emoji.stage import StageOptions, main, save_checkpoint
from recipes.emoji.target import SAVED
from recipes.emoji.tokenizer import VQ, Tokenizer
from storage.command_line import declare, option

STATE = "training_state.safetensors"  # file of the exported folder with values that only training needs
# "drawn" is the number of the next picture in the stream. The name is kept for stored files.
TOKENIZER = ("config", "rate", "step", "drawn", "spent_s")
TARGET = ("config", "step", "drawn", "pictures", "spent_s")


@declare("restored checkpoint")
class Options(StageOptions):
    """Options of the restored checkpoint."""

    start: str = option("folder that recipes.emoji.export wrote", "ckpts/emoji")


def write_state(folder: Path, tokenizer: dict, target: dict) -> None:
    """Writes the counts of the codes and the counters of tokenizer.pt and target.pt to a folder."""
    counters = {
        "tokenizer": {name: tokenizer[name] for name in TOKENIZER},
        "target": {name: target[name] for name in TARGET},
    }
    with replacing(folder / STATE) as part:
        save_file({"count": tokenizer["book"]["count"]}, part, {"kept": json.dumps(counters)})


def run(options: Options) -> None:
    """Writes tokenizer.pt and target.pt.

    Raises UserError if the work folder has one of them already, or if the checkpoint has no training state.
    """
    work, folder = Path(options.work_dir), Path(options.start)
    for name in ("tokenizer.pt", SAVED):
        if (work / name).exists():
            raise UserError(f"{work / name} exists: remove it, or give another --work_dir")
    if not (folder / STATE).exists():
        raise UserError(f"{folder} has no {STATE}: give a folder that recipes.emoji.export wrote")
    with safe_open(folder / STATE, "pt") as file:
        count, counters = file.get_tensor("count"), json.loads(file.metadata()["kept"])
    config = counters["tokenizer"]["config"]
    tokenizer = Tokenizer(VQConfig(**config), counters["tokenizer"]["rate"], torch.device("cpu"))
    exported = read_weights(folder)
    tokenizer.model.load_state_dict(dict(exported.below(VQ)))
    tokenizer.book.load_state_dict({"count": count, "total": tokenizer.book.weight * count[:, None]})
    state = {"model": tokenizer.model.state_dict(), "book": tokenizer.book.state_dict()}
    work.mkdir(parents=True, exist_ok=True)
    save_checkpoint(work / "tokenizer.pt", {**state, **counters["tokenizer"]})
    weights = exported.placed(torch.device("cpu"), torch.float32)
    shape = DecoderConfig(**counters["target"]["config"])
    decoder = gather(weights, decoder_names(shape), shape)
    start = {"codes": digest(tokenizer), "fresh_from": counters["target"]["step"]}
    save_checkpoint(work / SAVED, {"model": decoder, **start, **counters["target"]})
    print(json.dumps({"written": [str(work / "tokenizer.pt"), str(work / SAVED)], **counters["target"]}))


if __name__ == "__main__":
    main(Options, run, __doc__)
