"""The prompt files of the embedded model: what its tables, constants and drafter are made with.

All are functions of captions.jsonl. The pairs kept out of training are dealt in turn to the bench, to the
development prompts and to neither, so that constants are not chosen on what is published.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from training.emoji.bpe import caption
from training.emoji.pictures import Pictures

EACH = 8  # pairs of training, and kept out of it, in the bench's and the development prompts
CONTACT = 40  # pairs of training on the contact sheet, before those kept out


def deal(pictures: Pictures) -> dict[str, list[str]]:
    """File name -> bare captions."""
    texts = {
        split: [caption(row["style"], row["name"], []) for row in pictures.of_split(split)]
        for split in ("train", "held_out")
    }
    trained = random.Random("prompts").sample(texts["train"], min(2 * EACH + CONTACT, len(texts["train"])))
    held_out = texts["held_out"]
    return {
        "emoji_bench.txt": trained[:EACH] + held_out[0::3][:EACH],
        "emoji_development.txt": trained[EACH : 2 * EACH] + held_out[1::3][:EACH],
        "emoji_contact.txt": trained[2 * EACH :] + held_out,
        "emoji_held_out.txt": held_out,
    }


def run(args: Any) -> None:
    """Write the files, one prompt a line, and the drafter's prompts: those of a stream of pictures."""
    work, out = Path(args.work_dir), Path(args.out_dir)
    pictures = Pictures(work)
    drafter = [picture.text for picture in pictures.plan("drafter", range(args.num_prompts))]
    files = {out / name: texts for name, texts in deal(pictures).items()}
    files[out / "emoji_drafter_prompts.txt"] = drafter[: args.num_kept]
    files[work / "drafter_prompts.txt"] = drafter
    for path, texts in files.items():
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(json.dumps({str(path): len(texts) for path, texts in files.items()}))
