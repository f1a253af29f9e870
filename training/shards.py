"""Images stored as codes, from which drafters learn: safetensors shards and an index of their images.

index.json says how the images were made and lists every image (name, prompt, seed) by shard, in the order of
its rows. A shard holds the tensor `codes` [m, n] int32 and, where features are stored, `features.ROW.BRANCH`
[T, D] with branch 0 the conditional one. Every file is written completely or not at all, and a shard before
the index that lists it. Readers ignore shards that the index does not list. One process at a time writes.

Dimensions: m images in a shard, n codes per image, T positions of a branch (prompt and image tokens), D
features.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adt_tree.errors import CheckpointError, UserError, refuse_other
from models.checkpoint.files import read_json, reading, replacing, write_json
from models.model import Model
from storage.ownership import owned

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image as codes."""

    name: str  # unique in its folder
    text: str
    seed: int | None  # of the noise it was sampled with; None: encoded from a picture
    codes: list[int]
    features: Sequence[Tensor] = ()  # [T, D] of each branch; empty: training computes them


def origin(model: Model, generated: bool, features: bool) -> dict[str, Any]:
    """Returns the values by which stored images are matched with a model.

    generated: whether the target generated the images. If so, its weights must match. Images encoded from
    pictures depend on the weights only if features are stored.
    """
    codebook = model.codebook.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "model": model.name,
        "grid": [model.grid.height, model.grid.width],
        "num_codes": model.num_codes,
        "codebook": hashlib.sha256(codebook).hexdigest()[:16],
        "weights": model.weights_sha if generated or features else None,
        "features": features,
    }


@contextmanager
def shard_writer(root: Path, facts: Mapping[str, Any], size: int) -> Iterator[ShardWriter]:
    """Yields a writer into a folder that this process alone owns meanwhile. At the block's end all images are
    on disk. Raises UserError as owned() and ShardWriter."""
    with owned(root):
        writer = ShardWriter(root, facts, size)
        try:
            yield writer
        finally:
            writer.flush()


class ShardWriter:
    """A folder of shards to which images are added. Images of earlier runs stay in it."""

    def __init__(self, root: Path, facts: Mapping[str, Any], size: int) -> None:
        """facts: origin() and all options that change the images. size: images per shard.

        Raises UserError if the folder holds images made with other facts.
        """
        self.root, self.size, self._buffer = root, size, list[StoredImage]()
        facts = json.loads(json.dumps(facts))
        index = read_index(root) if (root / INDEX).exists() else {**facts, "shards": []}
        remedy = "choose another folder, or give the same options"
        refuse_other(index, facts, f"{root} holds images made with", remedy)
        whole = [shard for shard in index["shards"] if is_whole(root / shard["file"])]
        lost = [shard["file"] for shard in index["shards"] if shard not in whole]
        self._index = index | {"shards": whole}
        self.texts = {image["name"]: image["prompt"] for shard in whole for image in shard["images"]}
        if lost:
            shards = f"{len(lost)} missing or damaged shards, {lost[0]} first"
            print(f"warning: {root}: images of {shards}, are made anew", file=sys.stderr)
            # At once, because a shard of that name may come again with other images.
            write_json(root / INDEX, self._index, indent=None)

    def missing(self, texts: Mapping[str, str]) -> list[str]:
        """Returns the names of images, given with their texts, that the folder lacks. Raises UserError if it
        has an image of that name of another text."""
        for name in self.texts.keys() & texts:
            if self.texts[name] != texts[name]:
                raise UserError(
                    f"{self.root} holds image {name} of {self.texts[name][:80]!r}, now it is "
                    f"{texts[name][:80]!r}: choose another folder, or give the same texts"
                )
        return [name for name in texts if name not in self.texts]

    def add(self, image: StoredImage) -> None:
        """Adds an image. It is on disk once its shard is full, or after flush()."""
        self._buffer.append(image)
        self.texts[image.name] = image.text
        if len(self._buffer) >= self.size:
            self.flush()

    def flush(self) -> None:
        """Writes the images that are not yet on disk as one shard."""
        if not self._buffer:
            return
        images, shards = self._buffer, self._index["shards"]
        taken = {shard["file"] for shard in shards}
        file = next(name for name in map("data_{:05d}.safetensors".format, count()) if name not in taken)
        tensors = {"codes": torch.tensor([image.codes for image in images], dtype=torch.int32)}
        for row, image in enumerate(images):
            for branch, features in enumerate(image.features):
                tensors[f"features.{row}.{branch}"] = features.detach().cpu().contiguous()
        with replacing(self.root / file) as part:
            save_file(tensors, part)
        entries = [{"name": image.name, "prompt": image.text, "seed": image.seed} for image in images]
        shards.append({"file": file, "images": entries})
        write_json(self.root / INDEX, self._index, indent=None)
        self._buffer = []


def is_whole(path: Path) -> bool:
    """Returns whether a shard is there, with all bytes that its header names."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def read_index(root: Path) -> dict[str, Any]:
    """Returns the index of a folder. Raises CheckpointError if there is none, or it is damaged."""
    path = root / INDEX
    remedy = "give a folder that generate_train_data or extract_code has filled, or make the images again"
    index = read_json(path, remedy)
    with reading(path, remedy):
        names = [image["name"] for shard in index["shards"] for image in shard["images"]]
        if len(set(names)) != len(names):
            raise ValueError("two images have one name")
    return index


@dataclass(slots=True)
class Shards:
    """All images of some folders: codes in memory, features read when they are asked for."""

    codes: Tensor  # [N, n] int32
    texts: list[str]
    names: list[str]  # FOLDER/IMAGE, unique among all folders
    has_features: bool
    _places: list[tuple[Path, int]] = field(default_factory=list)  # shard and row of each image

    def __len__(self) -> int:
        return len(self.texts)

    def digest(self) -> str:
        """Returns the first 16 hexadecimal digits of the SHA-256 of names and codes."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        digest.update(self.codes.numpy().tobytes())
        return digest.hexdigest()[:16]

    def features(self, image: int) -> list[Tensor]:
        """Returns the stored features [T, D] of both branches of an image."""
        path, row = self._places[image]
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(f"features.{row}.{branch}") for branch in (0, 1)]


def read_shards(roots: Sequence[Path], model: Model) -> Shards:
    """Returns the images of the folders.

    UserError names a folder that is damaged, empty or of another model, or has the images of another one.
    """
    codes: list[Tensor] = []
    first = dict[str, Path]()  # digest of a folder's images -> the folder
    shards = Shards(torch.empty(0), [], [], True)
    for root in roots:
        index = read_index(root)
        facts = origin(model, index.get("weights") is not None, bool(index.get("features")))
        del facts["model"]  # a name: the same weights may have another
        remedy = "give that target as model_path, or images of this one"
        refuse_other(index, facts, f"{root} holds images of another target:", remedy)
        shards.has_features &= bool(index["features"])
        held = hashlib.sha256(json.dumps(index["shards"]).encode())
        for shard in index["shards"]:
            codes.append(_read_codes(root / shard["file"], len(shard["images"]), model))
            held.update(codes[-1].numpy().tobytes())
            for row, image in enumerate(shard["images"]):
                shards.texts.append(image["prompt"])
                shards.names.append(f"{root.name}/{image['name']}")
                shards._places.append((root / shard["file"], row))
        if (other := first.setdefault(held.hexdigest(), root)) is not root:
            raise UserError(f"data_dir {root}: it holds the images of {other} again; give one of them")
    if not codes:
        raise CheckpointError(f"{roots[0]} holds no images yet: let generate_train_data finish some")
    shards.codes = torch.cat(codes)
    return shards


def _read_codes(path: Path, num_images: int, model: Model) -> Tensor:
    """Returns the codes of a shard. Raises CheckpointError if they do not fit the index or the model."""
    with reading(path, "remove it, and make its images again"):
        with safe_open(path, framework="pt") as file:
            codes = file.get_tensor("codes")
        fits = codes.shape == (num_images, model.grid.size)
        if not fits or codes.min() < 0 or codes.max() >= model.num_codes:
            raise ValueError(f"holds codes {list(codes.shape)} that do not fit {INDEX} and the model")
    return codes
