"""Write the prompt files of the embedded model: for its tables, its constants, its drafter's data.

All are functions of captions.jsonl. The pairs kept out of training go in turn to the bench, to the
development prompts and to neither, so that constants are not tuned on the prompts that results are published
for.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from training.emoji.bpe import caption
from training.emoji.pictures import Pictures

EACH = 8  # trained pairs, and as many held-out ones, in the bench and in the development prompts
CONTACT = 40  # trained pairs on the contact sheet, which shows all held-out pairs after them


def deal(pictures: Pictures) -> dict[str, list[str]]:
    """Returns the prompts of each file, captions without keywords."""
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
    """Write the files, one prompt per line. The drafter's prompts are those of a stream of pictures."""
    work, out = Path(args.work_dir), Path(args.out_dir)
    pictures = Pictures(work)
    drafter_prompts = [picture.text for picture in pictures.plan("drafter", range(args.num_prompts))]
    files = {out / name: texts for name, texts in deal(pictures).items()}
    files[out / "emoji_drafter_prompts.txt"] = drafter_prompts[: args.num_kept]
    files[work / "drafter_prompts.txt"] = drafter_prompts
    for path, texts in files.items():
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(json.dumps({str(path): len(texts) for path, texts in files.items()}))
