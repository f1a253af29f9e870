"""Images kept as codes, what drafters learn from: shards of safetensors and an index of what they hold.

index.json says what made the images and lists every image (name, prompt, seed) by shard, in the order of its
rows. Shard tensors: `codes` [m, n] int32, and where features are kept `features.ROW.BRANCH` [T, D], branch 0
the conditional one. Both are written whole or not at all, the index last: what it does not name is not there.

Dimensions: m images of a shard, n codes an image, T rows of a branch (prefix and image tokens), D features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adt_tree.errors import CheckpointError, reason
from models.checkpoint.files import replacing
from models.model import Model

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """One image. name: unique in its folder. seed: of the noise it was drawn with; None: not drawn."""

    name: str
    text: str
    seed: int | None
    codes: list[int]
    features: Sequence[Tensor] = ()  # [T, D] of each branch; none: recomputed when they are needed


def origin(model: Model, drawn: bool, features: bool) -> dict[str, Any]:
    """What images of a model must have in common with it. drawn: by the target itself, else encoded."""
    raw = model.codebook.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "model": model.name,
        "grid": [model.grid.height, model.grid.width],
        "num_codes": model.num_codes,
        "codebook": hashlib.sha256(raw).hexdigest()[:16],
        "weights": model.weights_sha if drawn or features else None,
        "features": features,
    }


class ShardWriter:
    """A folder of shards that grows; images a former run left in it stay."""

    def __init__(self, root: Path, facts: Mapping[str, Any], size: int) -> None:
        """facts: of origin(), and whatever else tells images of one run from another's. size: images a shard.
        CheckpointError if the folder holds images of other facts."""
        self.root, self.size, self._buffer = root, size, list[Stored]()
        wanted = {"format": FORMAT, **json.loads(json.dumps(facts))}
        root.mkdir(parents=True, exist_ok=True)
        found = read_index(root) if (root / INDEX).exists() else {**wanted, "shards": []}
        for name, value in wanted.items():
            if found.get(name) != value:
                raise CheckpointError(
                    f"{root} holds images made with {name} = {found.get(name)!r}, now it is {value!r}: "
                    "choose another folder, or the same options"
                )
        # Images of a shard that is gone are made again.
        found["shards"] = [shard for shard in found["shards"] if (root / shard["file"]).is_file()]
        self._index = found
        self.names = {image["name"] for shard in found["shards"] for image in shard["images"]}

    def add(self, image: Stored) -> None:
        """Keep an image; it is on disk once its shard is full, or after flush()."""
        self._buffer.append(image)
        self.names.add(image.name)
        if len(self._buffer) >= self.size:
            self.flush()

    def flush(self) -> None:
        """Write the images not yet on disk as a shard of their own."""
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
        listed = [{"name": image.name, "prompt": image.text, "seed": image.seed} for image in images]
        shards.append({"file": file, "images": listed})
        with replacing(self.root / INDEX) as part:
            part.write_text(json.dumps(self._index, ensure_ascii=False) + "\n", encoding="utf-8")
        self._buffer = []


def read_index(root: Path) -> dict[str, Any]:
    """The index of a folder. CheckpointError if there is none, or if it is damaged."""
    path = root / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = [image["name"] for shard in index["shards"] for image in shard["images"]]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: give a folder that generate_train_data or extract_code has filled"
        ) from None
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({reason(error)}): make the images anew") from None
    if index.get("format") != FORMAT or len(set(names)) != len(names):
        raise CheckpointError(f"{path} is no index of images of this version: make them anew")
    return index


@dataclass(slots=True)
class Shards:
    """All images of some folders: codes in memory, features read when asked for."""

    codes: Tensor  # [N, n] int32
    texts: list[str]
    names: list[str]  # of image and folder: unique among all folders
    has_features: bool
    _places: list[tuple[Path, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def digest(self) -> str:
        """sha256, first 16 digits, over names and codes."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        digest.update(self.codes.numpy().tobytes())
        return digest.hexdigest()[:16]

    def features(self, image: int) -> list[Tensor]:
        """[T, D] of both branches, as stored."""
        path, row = self._places[image]
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(f"features.{row}.{branch}") for branch in (0, 1)]


def read_shards(roots: Sequence[Path], model: Model) -> Shards:
    """The images of the folders. CheckpointError names one that is damaged, empty or not of this model."""
    codes: list[Tensor] = []
    found = Shards(torch.empty(0), [], [], True)
    for root in roots:
        index = read_index(root)
        _refuse_other(root, index, model)
        found.has_features &= bool(index["features"])
        for shard in index["shards"]:
            codes.append(_codes(root / shard["file"], len(shard["images"]), model))
            for row, image in enumerate(shard["images"]):
                found.texts.append(image["prompt"])
                found.names.append(f"{root.name}/{image['name']}")
                found._places.append((root / shard["file"], row))
    if not codes:
        raise CheckpointError(f"{roots[0]} holds no images yet: let generate_train_data finish some")
    found.codes = torch.cat(codes)
    return found


def _refuse_other(root: Path, index: Mapping[str, Any], model: Model) -> None:
    """CheckpointError if the images of an index teach another model than this one."""
    drawn = index.get("weights") is not None
    for name, value in origin(model, drawn, bool(index.get("features"))).items():
        if name != "model" and index.get(name) != value:
            raise CheckpointError(
                f"{root} holds images of another target ({name} {index.get(name)}, this one has {value}): "
                "give its folder as --model_path, or images of this target"
            )


def _codes(path: Path, count: int, model: Model) -> Tensor:
    """A shard's codes."""
    try:
        with safe_open(path, framework="pt") as file:
            codes = file.get_tensor("codes")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}): remove it from {INDEX} and make its images anew"
        ) from None
    if codes.shape != (count, model.grid.size) or not 0 <= int(codes.min()) <= int(codes.max()) < (
        model.num_codes
    ):
        raise CheckpointError(f"{path} holds {list(codes.shape)} codes that do not fit {INDEX} and the model")
    return codes
