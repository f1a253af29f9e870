"""extract_code: encodes captioned pictures by the model's VQ encoder, as data for train_drafter.

Codes are stored as codebook ids, not as token ids. Captions are stored as they are, without padding.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ShardOptions, TargetOptions, check_guided
from models.checkpoint.files import json_text, read_text, reading
from storage.command_line import CommandOptions, declare, option

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from models.model import Model
    from models.target import EncodedPrompt

SHUFFLE_SEED = 42


@declare("data")
class Options(TargetOptions, ShardOptions, CommandOptions):
    """The model, and the pictures that it encodes."""

    data_path: str = option(
        "folder of pictures X.jpg, .png, .webp or another that Pillow reads, with captions X.txt, at any "
        "depth",
        "data/laion_coco",
        unit="DIR",
    )
    num_samples: int = option(
        "largest number of pictures; if there are more, a random subset", 1_000_000, unit="N", least=1
    )
    batch_size: int = option("pictures that are encoded at once", 16, unit="IMAGES", least=1)
    output_dir: str = "data/extracted_code"


def find_pairs(root: Path) -> tuple[dict[str, Path], int]:
    """Returns the pictures that have a caption, and the number of those that have none. Prints how many
    pictures there are, and what is skipped.

    A picture's name is its path below root without the suffix. Raises UserError if two pictures have the same
    name, or if none has a caption.
    """
    from eval.metrics.pictures import counted, list_pictures  # imports torch, for which --help must not wait

    if not root.is_dir():
        raise UserError(f"--data_path {root}: not a folder; give one of pictures X.jpg with captions X.txt")
    pictures: dict[str, Path] = {}
    paths, skipped = list_pictures(root)
    captions = {path.with_suffix(".txt") for path in paths}
    print(counted(root, paths, [path for path in skipped if path not in captions]))
    for path in paths:
        name = path.relative_to(root).with_suffix("").as_posix()
        if name in pictures:
            other = pictures[name].name
            raise UserError(f"--data_path {root}: {path.name} and {other} share a caption; rename one")
        pictures[name] = path
    pairs = {name: path for name, path in pictures.items() if path.with_suffix(".txt").is_file()}
    if not pairs:
        raise UserError(f"--data_path {root}: {len(pictures)} pictures, none with a caption X.txt beside it")
    return pairs, len(pictures) - len(pairs)


def centre_crop(picture: Image.Image, height: int, width: int) -> np.ndarray:
    """Returns the centre of a picture as uint8 [height, width, 3].

    Box filters halve the picture until one side is less than twice the wanted one. Bicubic interpolation then
    resizes it to the smallest size that covers height x width.
    """
    import numpy as np
    from PIL import Image

    while picture.height >= 2 * height and picture.width >= 2 * width:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = max(height / picture.height, width / picture.width)
    covering = max(round(picture.width * scale), width), max(round(picture.height * scale), height)
    picture = picture.resize(covering, Image.Resampling.BICUBIC)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return np.asarray(picture.crop((left, top, left + width, top + height)))


def caption_of(path: Path) -> str:
    """Returns the caption of a picture on one line. Raises CheckpointError if it cannot be read."""
    caption = path.with_suffix(".txt")
    with reading(caption, "write it anew in UTF-8"):
        return " ".join(read_text(caption).split())


def read_pair(path: Path, height: int, width: int) -> tuple[str, Tensor] | None:
    """Returns a caption and pixels uint8 [height, width, 3]; None if one is damaged, or the caption empty."""
    import torch

    from eval.metrics.pictures import read_image

    try:
        text = caption_of(path)
        pixels = centre_crop(read_image(path), height, width)
    except (OSError, ValueError):
        return None
    return (text, torch.from_numpy(pixels.copy())) if text else None


def encode(model: Model, pictures: list[Tensor]) -> list[list[int]]:
    """Returns the codes of each picture uint8 [height, width, 3]."""
    import torch

    from models.codecs.vq import from_uint8

    if not pictures:
        return []
    with torch.inference_mode():
        images = from_uint8(torch.stack(pictures)).to(model.codebook.device)
        return model.codec.encode(images).flatten(1).tolist()


def run(options: Options) -> None:
    """Encodes every picture that --output_dir lacks. The last line printed is one JSON document."""
    if options.features:
        check_guided(options, "--features")
    root, batch = Path(options.data_path), options.batch_size
    by_name, without_caption = find_pairs(root)
    pairs = list(by_name.items())
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    pairs = pairs[: options.num_samples]
    import torch
    from tqdm import tqdm

    from cli.model_from_options import load_without_drafter
    from training.shards import StoredImage, origin, shard_writer
    from training.teacher import features

    model = load_without_drafter(options).model
    grid, config = model.grid.image, model.codec.config
    if config is None:
        raise UserError(f"extract_code encodes pixels, and {model.codec.missing}")
    height, width = grid.height * config.patch_size, grid.width * config.patch_size
    facts = origin(model, generated=False, features=options.features)
    damaged = []
    with shard_writer(Path(options.output_dir), facts, options.shard_size) as writer:
        writer.missing({name: caption_of(path) for name, path in pairs if name in writer.texts})
        pending = [(name, path) for name, path in pairs if name not in writer.texts]
        for start in tqdm(range(0, len(pending), batch), unit="batch"):
            contents = {name: read_pair(path, height, width) for name, path in pending[start : start + batch]}
            damaged += [name for name, pair in contents.items() if pair is None]
            readable = {name: pair for name, pair in contents.items() if pair is not None}
            all_codes = encode(model, [pixels for _, pixels in readable.values()])
            for (name, (text, _)), codes in zip(readable.items(), all_codes, strict=True):
                branches: list[torch.Tensor] = []
                if options.features:
                    prompt = prompt_of(model, root / f"{name}.txt", text)
                    branches = features(model, prompt, torch.tensor(codes))
                writer.add(StoredImage(name, text, None, codes, branches))
    if len(damaged) == len(pairs):
        raise UserError(f"--data_path {options.data_path}: no picture can be read together with its caption")
    if damaged:
        skipped = f"{len(damaged)} pictures cannot be read with their captions and are skipped"
        print(f"warning: {skipped}, {damaged[0]} first", file=sys.stderr)
    print(json_text({
        "images": len(pairs) - len(damaged), "skipped": len(pairs) - len(pending),
        "damaged": damaged[:20], "without_caption": without_caption, "output_dir": options.output_dir,
    }))  # fmt: skip


def prompt_of(model: Model, file: Path, text: str) -> EncodedPrompt:
    """Encodes a caption for the target. UserError names the caption's file if the target cannot take it."""
    try:
        return model.encode(text)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
