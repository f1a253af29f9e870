"""Measures the tokenizer and the target on pictures they were not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recipes.emoji import target
from recipes.emoji.pictures import Pictures
from recipes.emoji.stage import main, saved_state, use_device
from recipes.emoji.tokenizer import Tokenizer, figures
from storage.command_line import declare, option


@declare("measurement")
class Options(target.Options):
    """Options of the target, and of the measurement."""

    num_pictures: int = option("pictures of each stream, such as held-out pairs", 384)


def run(options: Options) -> None:
    """Prints the figures as one JSON document."""
    device, work = use_device(options), Path(options.work_dir)
    pictures = Pictures(work)
    fresh = torch.from_numpy(pictures.render(pictures.plan("validation", range(options.num_pictures))))
    trainer = target.Trainer(options, device)
    trainer.resume(saved_state(work, "target"))
    state = {"trained_pictures": trainer.num_pictures, "trained_s": round(trainer.spent_s)}
    losses = trainer.validation(options.num_pictures)
    print(
        json.dumps({"tokenizer": figures(Tokenizer.load(work, device), fresh), "target": {**state, **losses}})
    )


if __name__ == "__main__":
    main(Options, run, __doc__)
