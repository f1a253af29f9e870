"""extract_code: pictures with captions -> codes by the model's VQ encoder, as train_drafter reads them.

Codes are codebook ids, whatever their token ids; captions keep their own length: nothing is padded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ModelOptions, ShardOptions
from cli.parser import Options as Base
from cli.parser import declare, option

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from models.model import Model
    from models.target import EncodedPrompt

SHUFFLE_SEED = 42


@declare
class DataOptions(Base):
    """data"""

    data_path: str = option(
        "pictures X.jpg, .jpeg, .png or .webp with captions X.txt, at any depth",
        "data/laion_coco",
        unit="DIR",
    )
    num_samples: int = option("pictures, drawn with seed 42 from more", 1_000_000, unit="N", least=1)


@declare
class Options(ModelOptions, DataOptions, ShardOptions):
    """run"""

    batch_size: int = 16
    output_dir: str = "data/extracted_code"


def find_pairs(root: Path) -> tuple[dict[str, Path], int]:
    """Pictures with a caption by name (their path below root without the suffix), and how many lack one."""
    from eval.metrics.pictures import SUFFIXES  # torch, which --help must not wait for

    if not root.is_dir():
        raise UserError(f"--data_path {root}: no such folder; give one of pictures X.jpg with captions X.txt")
    named: dict[str, Path] = {}
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES):
        name = path.relative_to(root).with_suffix("").as_posix()
        if name in named:
            raise UserError(f"--data_path {root}: {path.name} and {named[name].name} share a caption; rename")
        named[name] = path
    kept = {name: path for name, path in named.items() if path.with_suffix(".txt").is_file()}
    if not kept:
        raise UserError(f"--data_path {root}: {len(named)} pictures, none with a caption X.txt beside it")
    return kept, len(named) - len(kept)


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


def read_pair(path: Path, size: int) -> tuple[str, Tensor] | None:
    """Caption and pixels uint8 [size, size, 3]; None if either is damaged or the caption is empty."""
    import torch
    from PIL import Image

    try:
        text = " ".join(path.with_suffix(".txt").read_text(encoding="utf-8").split())
        with Image.open(path) as picture:
            pixels = centre_crop(picture.convert("RGB"), size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (text, torch.from_numpy(pixels.copy())) if text else None


def encode(model: Model, pictures: list[Tensor]) -> list[list[int]]:
    """The codes of each picture uint8 [size, size, 3]."""
    import torch

    from models.codecs.vq import from_uint8

    if not pictures:
        return []
    with torch.inference_mode():
        images = from_uint8(torch.stack(pictures)).to(model.codebook.device)
        return model.codec.encode(images).flatten(1).tolist()


def run(options: Options) -> None:
    """Encode every picture that the folder has no codes of yet; the last line printed is one JSON
    document."""
    root, batch = Path(options.data_path), options.batch_size
    found, lonely = find_pairs(root)
    pairs = list(found.items())
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    pairs = pairs[: options.num_samples]
    import torch
    from tqdm import tqdm

    from cli.loading import load_without_drafter
    from training.shards import ShardWriter, StoredImage, origin
    from training.teacher import features

    model = load_without_drafter(options).model
    size = model.grid.height * model.codec.config.patch_size
    facts = origin(model, generated=False, features=options.features)
    writer = ShardWriter(Path(options.output_dir), facts, options.shard_size)
    pending = [(name, path) for name, path in pairs if name not in writer.names]
    damaged = []
    try:
        for start in tqdm(range(0, len(pending), batch), unit="batch"):
            read = {name: read_pair(path, size) for name, path in pending[start : start + batch]}
            damaged += [name for name, pair in read.items() if pair is None]
            whole = {name: pair for name, pair in read.items() if pair is not None}
            coded = encode(model, [pixels for _, pixels in whole.values()])
            for (name, (text, _)), codes in zip(whole.items(), coded, strict=True):
                kept = ()
                if options.features:
                    prompt = prompt_of(model, root / f"{name}.txt", text)
                    kept = features(model, [prompt], torch.tensor([codes]))[0]
                writer.add(StoredImage(name, text, None, codes, kept))
    finally:
        writer.flush()
    if len(damaged) == len(pairs):
        raise UserError(f"--data_path {options.data_path}: not one picture and caption can be read")
    print(json.dumps({
        "images": len(pairs) - len(damaged), "skipped": len(pairs) - len(pending),
        "damaged": damaged[:20], "without_caption": lonely, "output_dir": options.output_dir,
    }))  # fmt: skip


def prompt_of(model: Model, file: Path, text: str) -> EncodedPrompt:
    """The caption as the target takes it. UserError if it cannot."""
    try:
        return model.encode(text)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
