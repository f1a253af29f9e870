"""Lists the images of a folder, pairs them with prompts, and crops them as the published metrics do.

Images and prompts are paired by name, not by order, so a missing image does not shift other prompts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from adt_tree.errors import UserError
from models.checkpoint.files import reading
from storage.prompts import Prompt, read_file
from storage.run_folder import IMAGES, RECORDS, SETTINGS, STATISTICS, file_name, read_statistics

# Folders of operating systems and network drives, with deleted files and small copies of pictures.
SYSTEM = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
RANKED = re.compile(r"(?:prompt|image)_(\d+)")  # LANTERN's file names: the row of the prompt file
MAX_NAMES = 3  # file names listed in one error


@dataclass(frozen=True, slots=True)
class Pair:
    """An image and the prompt it was generated from."""

    text: str
    path: Path


def list_pictures(folder: Path, deep: bool = True) -> tuple[list[Path], list[Path]]:
    """Returns the pictures of a folder, and everything in it that is skipped, both in natural order.

    A picture has a suffix of a format that Pillow reads. Hidden files and folders and those of SYSTEM are
    skipped. Links are followed; a folder that is reached twice is read once. deep: search folders at any
    depth. Raises OSError for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    pictures, skipped, seen = list[Path](), list[Path](), set[str]()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        shown = [name for name in sorted(folders) if deep and not (name.startswith(".") or name in SYSTEM)]
        skipped += [Path(place, name) for name in folders if name not in shown]
        folders[:] = shown
        for path in (Path(place, name) for name in files):
            is_picture = path.suffix.lower() in suffixes and not path.name.startswith(".")
            (pictures if is_picture else skipped).append(path)
    return sorted(pictures, key=_natural), sorted(skipped, key=_natural)


def counted(folder: Path, pictures: Sequence[Path], skipped: Sequence[Path]) -> str:
    """Returns a line that says how many pictures a folder holds, and what is skipped in it."""
    names = f"; {len(skipped)} skipped: {_first_names([path.name for path in skipped])}" if skipped else ""
    return f"{folder}: {len(pictures)} pictures{names}"


def images_of(folder: str, count: int, options: tuple[str, str], deep: bool = False) -> list[Path]:
    """Returns the first `count` images of a folder in natural order; -1: all of them. Prints how many it has.

    If the folder is a run's, these are the images in img/. deep: search nested folders too, because reference
    sets come as one folder per class; otherwise a folder img/ is taken for a run's. options: the names of the
    options that hold the folder and the count. Raises a UserError with these names if there are no images, or
    fewer than count.
    """
    root = place = Path(folder)
    if not root.is_dir():
        raise UserError(f"{options[0]} {folder}: not a folder; give one that holds images")
    is_run = (root / SETTINGS).is_file() or any(root.glob(STATISTICS.format("*", "*")))
    if (root / IMAGES).is_dir():
        place = root / IMAGES if is_run or not deep else root
    elif is_run and (root / RECORDS).is_dir():
        raise UserError(
            f"{options[0]} {folder}: the run's model gives codes, not pixels, so nothing can be scored"
        )
    images, skipped = list_pictures(place, deep)
    if not images:
        raise UserError(f"{options[0]} {counted(place, images, skipped)}; give a folder of pictures")
    if count > len(images):
        raise UserError(f"{options[1]} {count}: {options[0]} {folder} holds {len(images)} images; give fewer")
    print(f"  {counted(place, images, skipped)}")
    return images[: count if count > 0 else None]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A sort key that puts 2.png before 10.png."""
    words = re.split(r"(\d+)", path.as_posix())
    return [(0, int(word)) if word.isdigit() else (1, word) for word in words]


def prompts_of(folder: Path, source: str | None, option: str) -> list[Prompt]:
    """Returns the prompts of a file or, without one, those that the run in the folder recorded."""
    if source is not None:
        return read_file(Path(source))
    try:
        entries = read_statistics(folder).items()
        prompts = [Prompt(name, entry["prompt"], entry.get("ann_id")) for name, entry in entries]
        if prompts and all(isinstance(prompt.text, str) for prompt in prompts):
            return prompts
    except (UserError, TypeError, KeyError):
        pass
    raise UserError(f"{folder} has no readable record of its prompts: give them by {option}")


def pairs_of(folder: str, source: str | None, count: int, options: tuple[str, str]) -> list[Pair]:
    """Returns the first `count` prompts that have an image in the folder, each with it; -1: all prompts.

    An image is named after its prompt: by its name or annotation id (this program, ADT-Tree), or prompt_N or
    image_N for row N of the prompt file (LANTERN). options: the names of the options that hold the folder and
    the prompt file. Raises UserError if an image has no prompt, a prompt has two images, there are fewer
    pairs than count, or count is -1 and a prompt has no image.
    """
    paths = images_of(folder, -1, (options[0], "how_many"))
    prompts = prompts_of(Path(folder), source, options[1])
    by_name = {file_name(prompt.name): prompt for prompt in prompts}
    images: dict[str, Path] = {}
    strays: list[str] = []
    for path in paths:
        prompt = _prompt_of(path.stem, by_name, prompts)
        if prompt is None:
            strays.append(path.name)
        elif prompt.name in images:
            raise UserError(
                f"{path.name} and {images[prompt.name].name} in {path.parent} are both of prompt "
                f"{prompt.name[:80]!r}: remove one"
            )
        else:
            images[prompt.name] = path
    if strays:
        raise UserError(
            f"{len(strays)} of {len(paths)} images in {paths[0].parent} belong to no prompt "
            f"({_first_names(strays)}): give the prompt file they were made from, or remove them"
        )
    pairs = [Pair(prompt.text, images[prompt.name]) for prompt in prompts if prompt.name in images]
    missing = [prompt.name for prompt in prompts if prompt.name not in images]
    if len(pairs) < count or (count < 0 and missing):
        raise UserError(
            f"how_many {count}: {len(pairs)} of {len(prompts)} prompts have an image, "
            f"{_first_names(missing) or 'none'} missing; generate the rest, or give the number there is"
        )
    return pairs if count < 0 else pairs[:count]


def _prompt_of(stem: str, by_name: dict[str, Prompt], prompts: Sequence[Prompt]) -> Prompt | None:
    """Returns the prompt that an image's file name refers to; None if there is none."""
    if stem in by_name:
        return by_name[stem]
    ranked = RANKED.fullmatch(stem)
    if ranked is not None:
        row = int(ranked[1])
        return prompts[row] if row < len(prompts) else None
    return by_name.get(str(int(stem))) if stem.isascii() and stem.isdigit() else None  # 0903 is 903


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(name[:60] for name in names[:MAX_NAMES]) + more


def read_image(path: Path) -> Image.Image:
    """Returns an image as RGB; transparent pixels keep their stored colour, as in the published evaluations.

    Of 16-bit grey the upper 8 bits are kept, as Pillow keeps them of 16-bit colours; convert() would clip.
    CheckpointError names a damaged file, and one whose pixels have no fixed range.
    """
    with reading(path, "generate it again or remove it"), Image.open(path) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"has pixels of mode {image.mode}, whose range is not known")
        grey = image.mode.startswith("I;16")
        return (Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if grey else image).convert("RGB")


def centre_square(image: Image.Image) -> Image.Image:
    """Returns the central square whose side is the image's short side."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def reference_crop(image: Image.Image, side: int) -> Image.Image:
    """Returns the central square, resized by Lanczos to side x side, as LANTERN's evaluation does."""
    return centre_square(image).resize((side, side), Image.Resampling.LANCZOS)


def to_tensor(image: Image.Image) -> Tensor:
    """Returns the pixels in float32, [3, H, W], 0 to 255."""
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)


def clean_resize(image: Image.Image, side: int) -> Tensor:
    """Returns the image resized as clean-fid does: bicubic with anti-aliasing in float32, not rounded.

    [3, side, side], clipped to 0 to 255. Pillow resizes float images of one channel only.
    """
    channels = [
        np.asarray(Image.fromarray(channel).resize((side, side), Image.Resampling.BICUBIC))
        for channel in np.array(image, dtype=np.float32).transpose(2, 0, 1)
    ]
    return torch.from_numpy(np.stack(channels)).clamp(0, 255)


def long_side(image: Image.Image, side: int) -> Tensor:
    """Returns the image as HPS prepares it: resized until its long side is `side`, centred on a black square.

    [3, side, side], 0 to 255, bicubic with anti-aliasing in float32.
    """
    scale = side / max(image.size)
    height, width = round(image.height * scale), round(image.width * scale)
    resized = F.interpolate(to_tensor(image)[None], (height, width), mode="bicubic", antialias=True)[0]
    left, top = (side - width) // 2, (side - height) // 2
    return F.pad(resized, (left, side - width - left, top, side - height - top))
