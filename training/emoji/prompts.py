"""Prompts for the drafter's data: things the target was trained on, and mixtures of two it was not.

Images of known prompts come out of the target by heart: its law there is nearly one-hot, and a drafter that
saw no other learns nothing about how the target decodes what it is unsure of.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from training.emoji.bpe import caption, random_caption
from training.emoji.data import read_captions
from training.errors import StageError

TRIES = 100  # draws a prompt that is neither held out nor there already


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji prompts`."""
    parser.add_argument("--work_dir", default="data/emoji", help="folder of captions.jsonl")
    parser.add_argument("--out", default=None, help="text file (default WORK_DIR/drafter_prompts.txt)")
    parser.add_argument("--num_prompts", type=int, default=800)
    parser.add_argument("--mixed", type=float, default=0.5, help="share of prompts that mix two things")
    parser.add_argument("--seed", type=int, default=0)


def mix(one: str, other: str) -> str:
    """The first half of one name's words and the last half of the other's: "cat face" + "red heart" -> "cat
    heart"."""
    first, last = one.split(), other.split()
    return " ".join((*first[: (len(first) + 1) // 2], *last[len(last) // 2 :]))


def mixture(rows: list[dict], rng: random.Random) -> dict:
    """A thing like those of rows: a style, a name of two names, keywords of both."""
    one, other = rng.sample(rows, 2)
    keywords = [*one["keywords"], *other["keywords"]]
    return {"style": rng.choice(rows)["style"], "name": mix(one["name"], other["name"]), "keywords": keywords}


def compose(rows: list[dict], count: int, mixed: float, seed: int) -> list[str]:
    """`count` different prompts; of held-out pairs none, and no mixture has the name of a thing.

    rows: of captions.jsonl. StageError if there are too few things for so many.
    """
    known = [row for row in rows if row["split"] == "train"]
    names = {row["name"] for row in rows}
    rng, found = random.Random(seed), dict[str, None]()
    for _ in range(count):
        for _ in range(TRIES):
            row = mixture(known, rng) if rng.random() < mixed else rng.choice(known)
            text = random_caption(row, rng)
            if text not in found and (row["name"] not in names or row in known):
                found[text] = None
                break
        else:
            raise StageError(f"--num_prompts {count}: {len(known)} things give no more than {len(found)}")
    held_out = {caption(row["style"], row["name"], []) for row in rows if row["split"] != "train"}
    assert not any(text.split(",")[0] in held_out for text in found)
    return list(found)


def run(args: argparse.Namespace) -> None:
    """Write the prompts, one a line."""
    work = Path(args.work_dir)
    prompts = compose(read_captions(work), args.num_prompts, args.mixed, args.seed)
    out = Path(args.out) if args.out else work / "drafter_prompts.txt"
    out.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    print(json.dumps({"prompts": len(prompts), "out": str(out)}))
