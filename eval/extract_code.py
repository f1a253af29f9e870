"""extract_code: pictures with captions -> codes by the model's VQ encoder, as train_drafter reads them.

Codes are codebook ids, whatever their token ids; captions keep their own length: nothing is padded.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from eval.errors import UserError
from eval.session import load_undrawn
from eval.train_data import keep
from models.model import Model
from models.shards import ShardWriter, Stored, origin
from models.target import EncodedPrompt
from models.vq import from_uint8

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SHUFFLE_SEED = 42


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and its caption."""

    name: str  # its path below the data folder, without the suffix
    picture: Path
    caption: Path


def find_pairs(root: Path) -> tuple[list[Pair], int]:
    """Pictures with captions in the order of their names, and how many pictures lack one."""
    if not root.is_dir():
        raise UserError(f"--data_path {root}: no such folder; give one of pictures X.jpg with captions X.txt")
    pictures = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    named: dict[str, Path] = {}
    for path in pictures:
        name = path.relative_to(root).with_suffix("").as_posix()
        if name in named:
            raise UserError(f"--data_path {root}: {path.name} and {named[name].name} share a caption; rename")
        named[name] = path
    pairs = [Pair(name, path, path.with_suffix(".txt")) for name, path in named.items()]
    kept = [pair for pair in pairs if pair.caption.is_file()]
    if not kept:
        raise UserError(f"--data_path {root}: {len(pairs)} pictures, none with a caption X.txt beside it")
    return kept, len(pairs) - len(kept)


def centre_crop(picture: Image.Image, size: int) -> np.ndarray:
    """uint8 [size, size, 3]: halved by boxes while twice too large, short side to size by bicubic, centre."""
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    width, height = (max(round(side * scale), size) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(picture.crop((left, top, left + size, top + size)))


def read_pair(pair: Pair, size: int) -> tuple[str, Tensor] | None:
    """Caption and pixels uint8 [size, size, 3]; None if either is damaged or the caption is empty."""
    try:
        text = " ".join(pair.caption.read_text(encoding="utf-8").split())
        with Image.open(pair.picture) as picture:
            pixels = centre_crop(picture.convert("RGB"), size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (text, torch.from_numpy(pixels.copy())) if text else None


def run(args: argparse.Namespace) -> None:
    """Encode every picture that the folder has no codes of yet; the last line printed is one JSON
    document."""
    pairs, lonely = find_pairs(Path(args.data_path))
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    pairs = pairs[: args.num_samples]
    model = load_undrawn(args)
    facts = origin(model, drawn=False, features=args.features)
    writer = ShardWriter(Path(args.output_dir), facts, args.shard_size)
    pending = [pair for pair in pairs if pair.name not in writer.names]
    damaged = []
    try:
        for pair, text, codes in encoded(model, pending, args.batch_size):
            if text is None:
                damaged.append(pair.name)
                continue
            kept = ()
            if args.features:
                kept = keep(model, opening_of(model, pair, text), codes)
            writer.add(Stored(pair.name, text, None, codes, kept))
    finally:
        writer.flush()
    if len(damaged) == len(pairs):
        raise UserError(f"--data_path {args.data_path}: not one picture and caption can be read")
    print(json.dumps({
        "images": len(pairs) - len(damaged), "skipped": len(pairs) - len(pending),
        "damaged": damaged[:20], "without_caption": lonely, "output_dir": args.output_dir,
    }))  # fmt: skip


def opening_of(model: Model, pair: Pair, text: str) -> EncodedPrompt:
    """The caption as the target takes it. UserError if it cannot."""
    try:
        return model.encode(text)
    except ValueError as error:
        raise UserError(f"{pair.caption}: {error}") from error


@torch.inference_mode()
def encoded(model: Model, pairs: list[Pair], batch: int) -> Iterator[tuple[Pair, str | None, list[int]]]:
    """Each pair with its caption and codes; without them if it is damaged."""
    size = model.grid.height * model.codec.config.patch_size
    for start in tqdm(range(0, len(pairs), batch), unit="batch", disable=None):
        part = pairs[start : start + batch]
        found = [(pair, read_pair(pair, size)) for pair in part]
        pixels = [content[1] for _, content in found if content is not None]
        codes = iter(())
        if pixels:
            images = from_uint8(torch.stack(pixels)).to(model.codebook.device)
            codes = iter(model.codec.encode(images).flatten(1).tolist())
        for pair, content in found:
            yield (pair, None, []) if content is None else (pair, content[0], next(codes))
