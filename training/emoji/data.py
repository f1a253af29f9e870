"""Originals of the embedded model: npm emoji sets -> drawings on white, captions, split, licences, checksums.

Drawings are kept OVERSAMPLING times larger than the pictures drawn from them (training/emoji/pictures.py).
Everything written is a pure function of the package versions, the flags and the seed.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from adt_tree.errors import UserError

EMOJIBASE = "emojibase-data@17.0.0"
STYLES = {
    "noto": "@iconify-json/noto@1.2.9",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "fluent": "@iconify-json/fluent-emoji-flat@1.2.6",
}
SUBGROUPS = {
    "face-smiling": 14, "face-affection": 9, "face-tongue": 5, "face-glasses": 2, "face-costume": 8,
    "heart": 25,
    "animal-mammal": 66, "animal-bird": 22, "animal-amphibian": 1, "animal-reptile": 8, "animal-marine": 17,
    "animal-bug": 10, "plant-flower": 11, "plant-other": 16, "food-fruit": 20, "food-vegetable": 18,
    "food-prepared": 34, "food-asian": 17, "food-sweet": 14, "drink": 20, "sky-weather": 47,
    "transport-ground": 34, "transport-water": 9, "transport-air": 13, "event": 8, "award-medal": 2,
    "sport": 12,
    "musical-instrument": 11, "light-video": 12, "lock": 6, "place-building": 12, "game": 8, "tool": 8,
}  # fmt: skip
OVERSAMPLING = 4  # pixels of an original along a pixel of a picture
PINNED = (("noto", "red heart"), ("twemoji", "pizza"), ("fluent", "cat face"))
DROPPED_WORDS = frozenset(
    "oncoming moon guide service decoration exclamation mending revolving anger departure arrival shallow "
    "pouring clinking parachute seat railway suspension aerial lorry wheelchair construction derelict post "
    "love department convenience japanese medium sign mailbox flag head shaking bacteria carp tanabata pine "
    "dolls behind cableway minibus trolleybus melting".split()
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One emoji of emojibase: caption name, keywords without the words of the name, code points, subgroup."""

    name: str
    keywords: tuple[str, ...]
    hexcode: str
    subgroup: str


def fetch(package: str, cache: Path) -> Path:
    """Path of the tarball of NAME@VERSION; `npm pack` brings it into cache when it is absent there."""
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


def read_member(tarball: Path, member: str) -> dict | list:
    """The JSON file `package/MEMBER` of an npm tarball. UserError if the tarball is damaged."""
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            stream = archive.extractfile(f"package/{member}")
            assert stream is not None
            return json.load(stream)
    except (tarfile.TarError, EOFError, zlib.error, KeyError, ValueError, OSError) as error:
        raise UserError(f"{tarball} is damaged ({error}): remove it, npm fetches it anew") from error


def plain(hexcode: str) -> str:
    """Code points in lower case without variation selectors, the form in which sets are compared."""
    return hexcode.lower().replace("-fe0f", "")


def read_entries(tarball: Path) -> list[Entry]:
    """All emojis of emojibase that belong to a group, in its own order."""
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


def choose(entries: list[Entry], icons: dict[str, dict], args: Any) -> list[Entry]:
    """Names that all styles have, capped by SUBGROUPS, thinned evenly to max_names; pinned ones stay."""
    count, kept = dict.fromkeys(SUBGROUPS, 0), []
    for entry in entries:
        words = set(entry.name.replace("-", " ").split())
        full = count.get(entry.subgroup, 0) >= SUBGROUPS.get(entry.subgroup, 0)
        if full or words & DROPPED_WORDS or not all(entry.hexcode in icons[style] for style in args.styles):
            continue
        count[entry.subgroup] += 1
        kept.append(entry)
    pinned = {name for _, name in PINNED}
    surplus = len(kept) - args.max_names if args.max_names else 0
    if surplus > 0:
        free = [entry for entry in kept if entry.name not in pinned]
        drop = {free[(2 * i + 1) * len(free) // (2 * surplus)].name for i in range(surplus)}
        kept = [entry for entry in kept if entry.name not in drop]
    return kept


def load_icons(tarball: Path) -> dict[str, str]:
    """Code points -> complete SVG text, for every icon of an iconify set that has code points."""
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


def rasterise(svg: str, size: int) -> np.ndarray:
    """uint8 [size, size, 3]: an icon on white."""
    from resvg_py import svg_to_bytes

    png = svg_to_bytes(svg_string=svg, width=size, height=size, dpi=90, background="#ffffff")
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))


def held_out_pairs(names: list[str], styles: list[str], count: int, seed: int) -> set[tuple[str, str]]:
    """count (style, name) pairs, at most one a name, so that each name stays seen in the other styles."""
    rng = random.Random(seed)
    pairs = [(rng.choice(styles), name) for name in rng.sample(names, len(names))]
    pairs = [pair for pair in pairs if pair not in PINNED and len(styles) > 1]
    return set(pairs[:count])


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, content: object) -> None:
    """A file of one JSON document, as people read it."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def licence_record(styles: list[str], cache: Path) -> list[dict[str, str]]:
    """Title, author and licence of each source, read from the packages themselves."""
    record = []
    for style in styles:
        info = read_member(fetch(STYLES[style], cache), "info.json")
        licence, author = info["license"], info["author"]
        record.append(
            {"style": style, "package": STYLES[style], "title": info["name"], "author": author["name"],
             "source": author["url"], "licence": licence["spdx"], "licence_url": licence["url"]}
        )  # fmt: skip
    package = read_member(fetch(EMOJIBASE, cache), "package.json")
    record.append(
        {"style": "(names and keywords)", "package": EMOJIBASE, "title": "emojibase-data",
         "author": "Miles Johnson", "source": "https://github.com/milesj/emojibase",
         "licence": package["license"], "licence_url": "https://opensource.org/license/mit"}
    )  # fmt: skip
    return record


def run(args: Any) -> None:
    """Fetch, choose, rasterise and write originals.npy, captions.jsonl, licences.json, checksums.json."""
    if args.image_size % 4:
        raise UserError(f"--image_size {args.image_size}: give a multiple of 4")
    work = Path(args.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    cache = work / "npm"
    icons = {style: load_icons(fetch(STYLES[style], cache)) for style in args.styles}
    entries = choose(read_entries(fetch(EMOJIBASE, cache)), icons, args)
    most = len(entries) if len(args.styles) > 1 else 0
    if args.num_held_out > most:
        raise UserError(
            f"--num_held_out {args.num_held_out}: give 0 to {most}, one pair a name, none of a single style"
        )
    held_out = held_out_pairs([entry.name for entry in entries], args.styles, args.num_held_out, args.seed)
    originals, lines = [], []
    for entry in tqdm(entries, desc="rasterise", unit="name"):
        for style in args.styles:
            split = "held_out" if (style, entry.name) in held_out else "train"
            row = {"index": len(lines), "style": style, "name": entry.name, "keywords": entry.keywords,
                   "subgroup": entry.subgroup, "split": split}  # fmt: skip
            lines.append(json.dumps(row))
            originals.append(rasterise(icons[style][entry.hexcode], OVERSAMPLING * args.image_size))
    licences = licence_record(args.styles, cache)
    np.save(work / "originals.npy", np.stack(originals))
    (work / "captions.jsonl").write_text("\n".join(lines) + "\n")
    write_json(work / "licences.json", licences)
    sums = {name: sha256(work / name) for name in ("originals.npy", "captions.jsonl", "licences.json")}
    write_json(work / "checksums.json", sums)
    print(json.dumps({"names": len(entries), "originals": len(originals), "held_out": len(held_out), **sums}))


def read_captions(work: Path) -> list[dict]:
    """Rows of captions.jsonl in image order."""
    return [json.loads(line) for line in (work / "captions.jsonl").read_text().splitlines()]
