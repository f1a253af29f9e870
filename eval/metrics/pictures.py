"""Images of a folder, paired with their prompts by name, and cut to size as the published metrics do.

Nothing is paired by rank: a missing image is missing, and does not shift the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from adt_tree.errors import UserError
from eval.runs.prompts import Prompt, read_file
from eval.runs.run_folder import file_name, read_statistics

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
RANKED = re.compile(r"(?:prompt|image)_(\d+)")  # LANTERN's names: the row in the prompt file
SHOWN = 3  # names an error gives


@dataclass(frozen=True, slots=True)
class Pair:
    """An image and the text it was drawn from."""

    name: str
    text: str
    path: Path


def images_of(folder: str, count: int, options: tuple[str, str], deep: bool = False) -> list[Path]:
    """The first count images of a folder, or of its img/ (a run's maps and contact sheet lie beside that), in
    natural order; -1: all.

    deep: at any depth, as reference sets come in folders of classes. options: the folder's and the count's,
    for the UserError if there are none, or fewer than count.
    """
    place = Path(folder)
    if not place.is_dir():
        raise UserError(f"{options[0]} {folder}: it is no folder; give one that holds images")
    place = place / "img" if (place / "img").is_dir() else place
    entries = place.rglob("*") if deep else place.iterdir()
    found = [path for path in entries if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not found:
        raise UserError(f"{options[0]} {place}: it holds no {', '.join(SUFFIXES)}")
    if count > len(found):
        raise UserError(f"{options[1]} {count}: {options[0]} {folder} holds {len(found)} images; give fewer")
    return sorted(found, key=_natural)[: count if count > 0 else None]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Sorts 2.png before 10.png."""
    words = re.split(r"(\d+)", path.as_posix())
    return [(0, int(word)) if word.isdigit() else (1, word) for word in words]


def prompts_of(folder: Path, source: str | None, option: str) -> list[Prompt]:
    """The prompts of a file or, without one, those that the run in the folder recorded."""
    if source is not None:
        return read_file(Path(source))
    try:
        found = read_statistics(folder).items()
        prompts = [Prompt(name, entry["prompt"], entry.get("ann_id")) for name, entry in found]
        if prompts and all(isinstance(prompt.text, str) for prompt in prompts):
            return prompts
    except (UserError, TypeError, KeyError):
        pass
    raise UserError(f"{folder} records no prompts that can be read: name the prompts by {option}")


def pairs_of(folder: str, source: str | None, count: int, options: tuple[str, str]) -> list[Pair]:
    """The first count (--how_many) prompts that have an image in a folder, each with it; -1: all prompts.

    An image is named after its prompt: name or annotation id (this program, ADT-Tree), or prompt_N and
    image_N with N the row of the prompt file (LANTERN). options: the folder's and the prompt file's.
    UserError for images without a prompt, two for one, fewer than count, and for -1 prompts without an image.
    """
    paths = images_of(folder, -1, (options[0], "--how_many"))
    prompts = prompts_of(Path(folder), source, options[1])
    by_name = {file_name(prompt.name): prompt for prompt in prompts}
    taken: dict[str, Path] = {}
    strays: list[str] = []
    for path in paths:
        prompt = _prompt_of(path.stem, by_name, prompts)
        if prompt is None:
            strays.append(path.name)
        elif prompt.name in taken:
            raise UserError(
                f"{path.name} and {taken[prompt.name].name} in {path.parent} are both of prompt "
                f"{prompt.name[:80]!r}: remove one"
            )
        else:
            taken[prompt.name] = path
    if strays:
        raise UserError(
            f"{len(strays)} of {len(paths)} images in {paths[0].parent} are of no prompt ({_some(strays)}): "
            "give the prompt file they were made from, or remove them"
        )
    pairs = [Pair(p.name, p.text, taken[p.name]) for p in prompts if p.name in taken]
    missing = [prompt.name for prompt in prompts if prompt.name not in taken]
    if len(pairs) < count or (count < 0 and missing):
        raise UserError(
            f"--how_many {count}: {len(pairs)} of {len(prompts)} prompts have an image, missing are those of "
            f"{_some(missing) or 'none'}; make the rest, or state the number that there is"
        )
    return pairs if count < 0 else pairs[:count]


def _prompt_of(stem: str, by_name: dict[str, Prompt], prompts: Sequence[Prompt]) -> Prompt | None:
    if stem in by_name:
        return by_name[stem]
    ranked = RANKED.fullmatch(stem)
    if ranked is not None:
        row = int(ranked[1])
        return prompts[row] if row < len(prompts) else None
    return by_name.get(str(int(stem))) if stem.isascii() and stem.isdigit() else None


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:60] for name in names[:SHOWN]) + more


def read_image(path: Path) -> Image.Image:
    """RGB; what is transparent keeps its stored colour, as in the published code. UserError if damaged."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"image {path}: cannot be read ({error}); make it anew or remove it") from None


def centre_square(image: Image.Image) -> Image.Image:
    """The middle square as wide as the short side."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def reference_crop(image: Image.Image, side: int) -> Image.Image:
    """LANTERN's preprocessing: centre square, then Lanczos to side."""
    return centre_square(image).resize((side, side), Image.Resampling.LANCZOS)


def to_tensor(image: Image.Image) -> Tensor:
    """float32 [3, H, W], 0 to 255."""
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)


def clean_resize(image: Image.Image, side: int) -> Tensor:
    """clean-fid's: bicubic with anti-aliasing in float, clipped, not rounded. [3, side, side], 0 to 255."""
    channels = [
        np.asarray(Image.fromarray(channel).resize((side, side), Image.Resampling.BICUBIC))
        for channel in np.array(image, dtype=np.float32).transpose(2, 0, 1)
    ]
    return torch.from_numpy(np.stack(channels)).clamp(0, 255)


def long_side(image: Image.Image, side: int) -> Tensor:
    """HPS's: bicubic in float so that the long side is side, the rest black. [3, side, side], 0 to 255."""
    scale = side / max(image.size)
    size = (round(image.height * scale), round(image.width * scale))
    shown = F.interpolate(to_tensor(image)[None], size, mode="bicubic", antialias=True)[0]
    high, wide = side - size[0], side - size[1]
    return F.pad(shown, (wide // 2, wide - wide // 2, high // 2, high - high // 2))


def normalise(pixels: Tensor, mean: Iterable[float], std: Iterable[float]) -> Tensor:
    """Pixels of 0 to 255 as networks of ImageNet's tradition want them; mean and std of 0 to 1."""
    centre, spread = (torch.tensor(list(values)).view(3, 1, 1) for values in (mean, std))
    return (pixels / 255 - centre) / spread
