"""Prompts for the drafter's data: what trained pairs are called, as in the target's training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.emoji.pictures import Pictures
from training.errors import StageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji prompts`."""
    parser.add_argument("--work_dir", default="data/emoji", help="folder that the data stage filled")
    parser.add_argument("--out", default=None, help="text file (default WORK_DIR/drafter_prompts.txt)")
    parser.add_argument("--num_prompts", type=int, default=5000)


def run(args: argparse.Namespace) -> None:
    """Write the prompts, one a line: those of a stream of pictures of its own."""
    if args.num_prompts < 1:
        raise StageError(f"--num_prompts {args.num_prompts}: it must be positive")
    work = Path(args.work_dir)
    texts = [picture.text for picture in Pictures(work).plan("drafter", range(args.num_prompts))]
    out = Path(args.out) if args.out else work / "drafter_prompts.txt"
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(json.dumps({"prompts": len(texts), "out": str(out)}))
