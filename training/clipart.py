"""Debian's openclipart-svg as one more style: public-domain drawings of things, captions from their titles.

apt fetches the pinned version, so only a Debian that has it can build this; unpacking needs no root.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageOps

from training.errors import StageError

STYLE = "openclipart"
PACKAGE = "openclipart-svg=1:0.18+dfsg-19"
SHA256 = "989712d90d57dfa3230049f553bb43b76c30ee4d4b8c5f6e106e33f7db5cbdc5"
FOLDERS = ("animals", "buildings", "containers", "food", "plants", "tools", "transportation")
LICENCE = {
    "style": STYLE, "package": PACKAGE, "title": "Open Clip Art Library", "author": "its contributors",
    "source": "https://packages.debian.org/openclipart-svg", "licence": "public domain",
    "licence_url": "http://web.resource.org/cc/PublicDomain",
}  # fmt: skip
EMPTY_TAGS = ("hash", "unsorted")
LONGEST_TITLE, WIDEST = 6, 2.0  # words; longer side by shorter side


def fetch(cache: Path) -> Path:
    """The package's folder of drawings inside cache, fetched and unpacked when it is absent there."""
    home = cache / PACKAGE.replace(":", ".")
    if not home.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "download", "--quiet", PACKAGE], cwd=cache, check=True)
            (package,) = cache.glob("openclipart-svg_*.deb")
            if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
                raise StageError(f"{package} has another checksum than {PACKAGE}: remove it and try again")
            part = home.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            subprocess.run(["dpkg-deb", "-x", package.name, part.name], cwd=cache, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise StageError(f"--openclipart: apt-get cannot give {PACKAGE} here ({error})") from error
        part.rename(home)
    return home / "usr" / "share" / "openclipart" / "svg"


def describe(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """Name and keywords from the drawing's RDF; None without a short title in the public domain."""
    try:
        work = next((e for e in ElementTree.parse(path).iter() if e.tag.endswith("}Work")), None)
    except (ElementTree.ParseError, ValueError):
        return None
    fields = {e.tag.rpartition("}")[2]: e for e in (work if work is not None else ())}
    if not {"title", "license"} <= set(fields):
        return None
    free = any(value.lower().endswith("publicdomain") for value in fields["license"].attrib.values())
    title = re.sub(r"\(.*?\)", "", fields["title"].text or "")  # (B and W)
    words = re.findall(r"[a-z']+", title.lower())
    if not free or not 0 < len(words) <= LONGEST_TITLE:
        return None
    tags = [(e.text or "").strip().lower() for e in work.iter() if e.tag.endswith("}li")]
    kept = [
        tag
        for tag in dict.fromkeys(tags)
        if re.fullmatch(r"[a-z]+", tag) and tag not in (*words, *EMPTY_TAGS)
    ]
    return " ".join(words), tuple(kept)


def draw(svg: str, size: int) -> np.ndarray | None:
    """uint8 [size, size, 3], centred on white; None for what does not render, is blank or far from square."""
    from resvg_py import svg_to_bytes

    try:
        png = svg_to_bytes(svg_string=svg, width=2 * size, dpi=90, background="#ffffff")
    except ValueError:
        return None
    image = Image.open(io.BytesIO(bytes(png))).convert("RGB")
    if max(image.size) > WIDEST * min(image.size):
        return None
    pixels = np.asarray(ImageOps.pad(image, (size, size), Image.Resampling.BOX, color="white"))
    return pixels if pixels.min() < 128 else None


def pictures(folder: Path, size: int) -> Iterator[tuple[dict, np.ndarray]]:
    """Caption rows without an index, and images, in order of path; of equal names the first."""
    seen: set[str] = set()
    for path in sorted(path for kind in FOLDERS for path in (folder / kind).rglob("*.svg")):
        found = None if path.is_symlink() else describe(path)
        if found is None or found[0] in seen:
            continue
        image = draw(path.read_text(encoding="utf-8", errors="replace"), size)
        if image is not None:
            seen.add(found[0])
            kind = path.relative_to(folder).parts[0]
            yield {"style": STYLE, "name": found[0], "keywords": found[1], "subgroup": kind,
                   "split": "train"}, image  # fmt: skip
