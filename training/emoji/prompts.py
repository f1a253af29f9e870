"""Prompts for the drafter's data: what trained pairs are called, as in the target's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.emoji.pictures import Pictures


def run(args: Any) -> None:
    """Write the prompts, one a line: those of a stream of pictures of its own."""
    work = Path(args.work_dir)
    texts = [picture.text for picture in Pictures(work).plan("drafter", range(args.num_prompts))]
    out = Path(args.out) if args.out else work / "drafter_prompts.txt"
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(json.dumps({"prompts": len(texts), "out": str(out)}))
