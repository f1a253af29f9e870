"""A contact sheet of the exported target: its drawings for trained and held-out captions, under originals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.emoji.bpe import caption
from training.emoji.data import PINNED
from training.emoji.drawing import draw
from training.emoji.pictures import Jitter, Pictures, place
from training.loop import sheet

COLUMNS = 8
MIDDLE = Jitter(0.9, 0.0, 0.5, 0.5, False)  # how originals are shown
FRAME = (220, 40, 40)  # colour of the edge of held-out pairs


def choose_rows(rows: list[dict], num_seen: int, num_held_out: int, seed: int) -> list[dict]:
    """The pinned pairs, further trained pairs, then held-out pairs; a function of the seed."""
    rng = random.Random(seed)
    pinned = [row for row in rows if (row["style"], row["name"]) in PINNED]
    seen = [row for row in rows if row["split"] == "train" and row not in pinned]
    held_out = [row for row in rows if row["split"] == "held_out"]
    return (pinned + rng.sample(seen, num_seen))[:num_seen] + rng.sample(held_out, num_held_out)


def framed(picture: np.ndarray) -> np.ndarray:
    """A copy [P, P, 3] with an edge of one pixel."""
    edged = np.full_like(picture, FRAME)
    edged[1:-1, 1:-1] = picture[1:-1, 1:-1]
    return edged


def run(args: Any) -> None:
    """Draw and write the sheet; the last line printed is the list of captions."""
    torch.set_num_threads(args.threads)
    work = Path(args.work_dir)
    pictures = Pictures(work)
    rows = choose_rows(pictures.rows, args.num_seen, args.num_held_out, args.seed)
    texts = [caption(row["style"], row["name"], []) for row in rows]
    drawn = draw(texts, args)
    drawn = [framed(one) if row["split"] == "held_out" else one for row, one in zip(rows, drawn, strict=True)]
    originals = [place(pictures.originals[row["index"]], MIDDLE) for row in rows]
    lines = [picture for start in range(0, len(rows), COLUMNS) for part in (originals, drawn)
             for picture in part[start : start + COLUMNS]]  # fmt: skip
    sheet(np.stack(lines), COLUMNS, Path(args.out) if args.out else work / "contact.png")
    print(json.dumps(texts))
