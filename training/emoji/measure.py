"""Measures the tokenizer and the target on pictures they were not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training.emoji import target
from training.emoji.pictures import Pictures
from training.emoji.tokenizer import Tokenizer, figures
from training.loop import load_checkpoint, use_device, write_figures


def run(args: Any) -> None:
    """Prints and stores the figures of the parts that --of names. The decayed target is measured if there is
    one, else the stable one."""
    device, work = use_device(args), Path(args.work_dir)
    if "tokenizer" in args.of:
        pictures = Pictures(work)
        fresh = torch.from_numpy(pictures.render(pictures.plan("validation", range(args.num_pictures))))
        write_figures(work, "tokenizer", figures(Tokenizer.load(work, device), fresh))
    if "target" in args.of:
        trainer = target.Trainer(args, device)
        name = target.newest(work)
        trainer.resume(load_checkpoint(work / name), name)
        state = {"file": name, "trained_pictures": trainer.num_pictures, "trained_s": round(trainer.spent_s)}
        write_figures(work, "target", {**state, **trainer.validation(args.num_pictures)})
