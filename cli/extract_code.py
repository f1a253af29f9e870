"""extract_code: pictures with captions -> codes by the model's VQ encoder, as train_drafter reads them.

Codes are codebook ids, whatever their token ids; captions keep their own length: nothing is padded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.groups import ModelOptions, ShardOptions
from cli.options import Options as Base
from cli.options import declare, option
from eval.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from models.model import Model
    from models.target import EncodedPrompt

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SHUFFLE_SEED = 42


@declare
class DataOptions(Base):
    """data"""

    data_path: str = option(
        "pictures X.jpg, X.jpeg, X.png or X.webp with their captions X.txt, in folders below it too",
        "data/laion_coco",
        unit="DIR",
    )
    num_samples: int = option("pictures, drawn with seed 42 from more", 1_000_000, unit="N", within=(1, None))


@declare
class Options(ModelOptions, DataOptions, ShardOptions):
    """run"""

    batch_size: int = 16
    output_dir: str = "data/extracted_code"


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
    import numpy as np
    from PIL import Image

    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    width, height = (max(round(side * scale), size) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(picture.crop((left, top, left + size, top + size)))


def read_pair(pair: Pair, size: int) -> tuple[str, Tensor] | None:
    """Caption and pixels uint8 [size, size, 3]; None if either is damaged or the caption is empty."""
    import torch
    from PIL import Image

    try:
        text = " ".join(pair.caption.read_text(encoding="utf-8").split())
        with Image.open(pair.picture) as picture:
            pixels = centre_crop(picture.convert("RGB"), size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (text, torch.from_numpy(pixels.copy())) if text else None


def run(options: Options) -> None:
    """Encode every picture that the folder has no codes of yet; the last line printed is one JSON
    document."""
    pairs, lonely = find_pairs(Path(options.data_path))
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    pairs = pairs[: options.num_samples]
    import torch

    from cli.loading import load_without_drafter
    from models.drafters.shards import ShardWriter, Stored, origin
    from models.teacher import features

    model = load_without_drafter(options)[0].model
    facts = origin(model, drawn=False, features=options.features)
    writer = ShardWriter(Path(options.output_dir), facts, options.shard_size)
    pending = [pair for pair in pairs if pair.name not in writer.names]
    damaged = []
    try:
        for pair, text, codes in encoded(model, pending, options.batch_size):
            if text is None:
                damaged.append(pair.name)
                continue
            kept = ()
            if options.features:
                kept = features(model, [prompt_of(model, pair, text)], torch.tensor([codes]))[0]
            writer.add(Stored(pair.name, text, None, codes, kept))
    finally:
        writer.flush()
    if len(damaged) == len(pairs):
        raise UserError(f"--data_path {options.data_path}: not one picture and caption can be read")
    print(json.dumps({
        "images": len(pairs) - len(damaged), "skipped": len(pairs) - len(pending),
        "damaged": damaged[:20], "without_caption": lonely, "output_dir": options.output_dir,
    }))  # fmt: skip


def prompt_of(model: Model, pair: Pair, text: str) -> EncodedPrompt:
    """The caption as the target takes it. UserError if it cannot."""
    try:
        return model.encode(text)
    except ValueError as error:
        raise UserError(f"{pair.caption}: {error}") from error


def encoded(model: Model, pairs: list[Pair], batch: int) -> Iterator[tuple[Pair, str | None, list[int]]]:
    """Each pair with its caption and codes; without them if it is damaged."""
    import torch
    from tqdm import tqdm

    from models.codecs.vq import from_uint8

    size = model.grid.height * model.codec.config.patch_size
    for start in tqdm(range(0, len(pairs), batch), unit="batch", disable=None):
        part = pairs[start : start + batch]
        found = [(pair, read_pair(pair, size)) for pair in part]
        pixels = [content[1] for _, content in found if content is not None]
        codes = iter(())
        if pixels:
            with torch.inference_mode():
                images = from_uint8(torch.stack(pixels)).to(model.codebook.device)
                codes = iter(model.codec.encode(images).flatten(1).tolist())
        for pair, content in found:
            yield (pair, None, []) if content is None else (pair, content[0], next(codes))
