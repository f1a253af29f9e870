"""Builds the originals of the embedded model from emoji sets on npm.

Writes emoji rasterised on white, their captions, the split into trained and held-out pairs, licences and
checksums. Originals are OVERSAMPLING times larger than the pictures rendered from them
(recipes/emoji/pictures.py). Everything written is a pure function of the package versions.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from adt_tree.errors import UserError
from models.checkpoint.files import lines_of, read_text, reading, write_json
from recipes.emoji.stage import StageOptions as Options
from recipes.emoji.stage import main

EMOJIBASE = "emojibase-data@17.0.0"
STYLES = {
    "noto": "@iconify-json/noto@1.2.9",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "fluent": "@iconify-json/fluent-emoji-flat@1.2.6",
}
SUBGROUPS = {  # subgroup of emojibase -> the most names taken from it
    "face-smiling": 14, "face-affection": 9, "face-tongue": 5, "face-glasses": 2, "face-costume": 8,
    "heart": 25,
    "animal-mammal": 66, "animal-bird": 22, "animal-amphibian": 1, "animal-reptile": 8, "animal-marine": 17,
    "animal-bug": 10, "plant-flower": 11, "plant-other": 16, "food-fruit": 20, "food-vegetable": 18,
    "food-prepared": 34, "food-asian": 17, "food-sweet": 14, "drink": 20, "sky-weather": 47,
    "transport-ground": 34, "transport-water": 9, "transport-air": 13, "event": 8, "award-medal": 2,
    "sport": 12,
    "musical-instrument": 11, "light-video": 12, "lock": 6, "place-building": 12, "game": 8, "tool": 8,
}  # fmt: skip
OVERSAMPLING = 4  # pixels of an original per pixel of a picture, along each side
# Pairs that are always in the data and always trained on.
PINNED = (("noto", "red heart"), ("twemoji", "pizza"), ("fluent", "cat face"))
DROPPED_WORDS = frozenset(
    "oncoming moon guide service decoration exclamation mending revolving anger departure arrival shallow "
    "pouring clinking parachute seat railway suspension aerial lorry wheelchair construction derelict post "
    "love department convenience japanese medium sign mailbox flag head shaking bacteria carp tanabata pine "
    "dolls behind cableway minibus trolleybus melting".split()
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One emoji of emojibase."""

    name: str  # the name in captions
    keywords: tuple[str, ...]  # emojibase's tags that share no word with the name
    hexcode: str  # code points
    subgroup: str


def fetch(package: str, cache: Path) -> Path:
    """Returns the tarball of a package NAME@VERSION. `npm pack` fetches it if the cache does not hold it."""
    name, version = package.lstrip("@").rsplit("@", 1)
    path = cache / f"{name.replace('/', '-')}-{version}.tgz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["npm", "pack", "--silent", package], cwd=cache, check=True, stdout=subprocess.DEVNULL
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"npm cannot fetch {package} ({error}): install npm, or put {path.name} into {cache}"
            ) from error
    return path


def read_member(tarball: Path, member: str) -> Any:
    """Returns the JSON in `package/MEMBER` of an npm tarball. Raises UserError if it is damaged."""
    with reading(tarball, "remove it, and npm fetches it again"), tarfile.open(tarball, "r:gz") as archive:
        stream = archive.extractfile(f"package/{member}")
        assert stream is not None
        content = json.load(stream)
    return content


def plain(hexcode: str) -> str:
    """Returns code points in lower case and without variation selectors, which the sets write differently."""
    return hexcode.lower().replace("-fe0f", "")


def read_entries(tarball: Path) -> list[Entry]:
    """Returns all emojis of emojibase that belong to a group, in the order of emojibase."""
    names = read_member(tarball, "meta/groups.json")["subgroups"]
    entries = []
    for item in sorted(read_member(tarball, "en/data.json"), key=lambda item: item.get("order", 10**6)):
        if "group" not in item:
            continue
        name = item["label"].lower().replace("’", "'")
        words = set(name.replace("-", " ").split())
        keywords = tuple(tag for tag in item.get("tags", []) if not set(tag.lower().split()) & words)
        entries.append(Entry(name, keywords, plain(item["hexcode"]), names[str(item["subgroup"])]))
    return entries


def choose(entries: list[Entry], icons: dict[str, dict], max_names: int = 140) -> list[Entry]:
    """Returns the entries that all styles have, at most as many of each subgroup as SUBGROUPS says.

    If there are more than max_names, evenly spaced entries are dropped, but no pinned ones.
    """
    count, chosen = dict.fromkeys(SUBGROUPS, 0), []
    for entry in entries:
        words = set(entry.name.replace("-", " ").split())
        full = count.get(entry.subgroup, 0) >= SUBGROUPS.get(entry.subgroup, 0)
        if full or words & DROPPED_WORDS or not all(entry.hexcode in drawn for drawn in icons.values()):
            continue
        count[entry.subgroup] += 1
        chosen.append(entry)
    pinned = {name for _, name in PINNED}
    surplus = len(chosen) - max_names
    if surplus > 0:
        free = [entry for entry in chosen if entry.name not in pinned]
        drop = {free[(2 * i + 1) * len(free) // (2 * surplus)].name for i in range(surplus)}
        chosen = [entry for entry in chosen if entry.name not in drop]
    return chosen


def load_icons(tarball: Path) -> dict[str, str]:
    """Returns a map from code points to the SVG of an icon, for an iconify set."""
    sheet, chars = read_member(tarball, "icons.json"), read_member(tarball, "chars.json")
    default = sheet.get("width", 16), sheet.get("height", 16)
    icons = {}
    for hexcode, name in chars.items():
        icon = sheet["icons"].get(sheet.get("aliases", {}).get(name, {}).get("parent", name))
        if icon is None:
            continue
        width, height = icon.get("width", default[0]), icon.get("height", default[1])
        side = max(width, height)
        left, top = icon.get("left", 0) - (side - width) / 2, icon.get("top", 0) - (side - height) / 2
        space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        frame = f'{space} viewBox="{left} {top} {side} {side}" width="{side}" height="{side}"'
        icons[plain(hexcode)] = f"<svg {frame}>{icon['body']}</svg>"
    return icons


def rasterise(svg: str, size: int = 64 * OVERSAMPLING) -> np.ndarray:
    """Returns an icon on white: uint8 [size, size, 3], for pictures of 64 pixels a side."""
    from resvg_py import svg_to_bytes

    png = svg_to_bytes(svg_string=svg, width=size, height=size, dpi=90, background="#ffffff")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))


def held_out_pairs(names: list[str], count: int = 24, seed: int = 0) -> set[tuple[str, str]]:
    """Returns `count` (style, name) pairs to keep out of training.

    At most one for each name, so that every name is trained on in the other styles.
    """
    rng = random.Random(seed)
    pairs = [(rng.choice(tuple(STYLES)), name) for name in rng.sample(names, len(names))]
    return set([pair for pair in pairs if pair not in PINNED][:count])


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def licence_record(cache: Path) -> list[dict[str, str]]:
    """Returns title, author and licence of each source, as its package states them."""
    record = []
    for style, package in STYLES.items():
        info = read_member(fetch(package, cache), "info.json")
        licence, author = info["license"], info["author"]
        record.append(
            {"style": style, "package": package, "title": info["name"], "author": author["name"],
             "source": author["url"], "licence": licence["spdx"], "licence_url": licence["url"]}
        )  # fmt: skip
    emojibase = read_member(fetch(EMOJIBASE, cache), "package.json")
    record.append(
        {"style": "(names and keywords)", "package": EMOJIBASE, "title": "emojibase-data",
         "author": "Miles Johnson", "source": "https://github.com/milesj/emojibase",
         "licence": emojibase["license"], "licence_url": "https://opensource.org/license/mit"}
    )  # fmt: skip
    return record


def run(options: Options) -> None:
    """Writes originals.npy, captions.jsonl, licences.json and checksums.json."""
    work = Path(options.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    cache = work / "npm"
    icons = {style: load_icons(fetch(package, cache)) for style, package in STYLES.items()}
    entries = choose(read_entries(fetch(EMOJIBASE, cache)), icons)
    held_out = held_out_pairs([entry.name for entry in entries])
    originals: list[np.ndarray] = []
    lines: list[str] = []
    for entry in tqdm(entries, desc="rasterise", unit="name"):
        for style in STYLES:
            split = "held_out" if (style, entry.name) in held_out else "train"
            row = {"index": len(lines), "style": style, "name": entry.name, "keywords": entry.keywords,
                   "subgroup": entry.subgroup, "split": split}  # fmt: skip
            lines.append(json.dumps(row))
            originals.append(rasterise(icons[style][entry.hexcode]))
    licences = licence_record(cache)
    np.save(work / "originals.npy", np.stack(originals))
    (work / "captions.jsonl").write_text("\n".join(lines) + "\n")
    write_json(work / "licences.json", licences)
    sums = {name: sha256(work / name) for name in ("originals.npy", "captions.jsonl", "licences.json")}
    write_json(work / "checksums.json", sums)
    print(json.dumps({"names": len(entries), "originals": len(originals), "held_out": len(held_out), **sums}))


def read_captions(work: Path) -> list[dict]:
    """Returns the rows of captions.jsonl, in the order of the originals."""
    return [json.loads(line) for line in lines_of(read_text(work / "captions.jsonl"))]


if __name__ == "__main__":
    main(Options, run, __doc__)
