"""Writes the prompt files of the embedded model: for its tables, its constants, and its drafter's data.

All are functions of captions.jsonl. The pairs left out of training go in turn to the bench, to the
development prompts and to neither, so that constants are not tuned on the prompts of published results.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from recipes.emoji.bpe import caption
from recipes.emoji.pictures import Pictures
from recipes.emoji.stage import StageOptions, main
from storage.command_line import declare, option

NUM_PAIRS = 8  # trained pairs in the bench, and in the development prompts; each has as many held-out pairs
NUM_CONTACT = 40  # trained pairs on the contact sheet, which shows all held-out pairs after them


@declare("prompt files")
class Options(StageOptions):
    """Options of the prompt files."""

    out_dir: str = option("folder of the prompt files", "configs")
    num_prompts: int = option("prompts in WORK_DIR/drafter_prompts.txt", 5000)
    num_kept: int = option("how many of these to write to OUT_DIR as well", 800)


def prompts_by_file(pictures: Pictures) -> dict[str, list[str]]:
    """Returns the prompts of each file by its name: captions without keywords."""
    texts = {
        split: [caption(row["style"], row["name"], []) for row in pictures.of_split(split)]
        for split in ("train", "held_out")
    }
    count = min(2 * NUM_PAIRS + NUM_CONTACT, len(texts["train"]))
    trained = random.Random("prompts").sample(texts["train"], count)
    held_out = texts["held_out"]
    return {
        "emoji_bench.txt": trained[:NUM_PAIRS] + held_out[0::3][:NUM_PAIRS],
        "emoji_development.txt": trained[NUM_PAIRS : 2 * NUM_PAIRS] + held_out[1::3][:NUM_PAIRS],
        "emoji_contact.txt": trained[2 * NUM_PAIRS :] + held_out,
        "emoji_held_out.txt": held_out,
    }


def run(options: Options) -> None:
    """Writes the files, one prompt per line. The drafter's prompts are those of a stream of pictures."""
    work, out = Path(options.work_dir), Path(options.out_dir)
    pictures = Pictures(work)
    drafter_prompts = [picture.text for picture in pictures.plan("drafter", range(options.num_prompts))]
    files = {out / name: texts for name, texts in prompts_by_file(pictures).items()}
    files[out / "emoji_drafter_prompts.txt"] = drafter_prompts[: options.num_kept]
    files[work / "drafter_prompts.txt"] = drafter_prompts
    for path, texts in files.items():
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(json.dumps({str(path): len(texts) for path, texts in files.items()}))


if __name__ == "__main__":
    main(Options, run, __doc__)
