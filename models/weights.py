"""Tensors of a checkpoint by name, read from disk when asked for and put where they belong at once.

EncodedPrompt reads headers only: names, shapes and sizes are known, and a missing or truncated file is found,
before a byte of weights is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import CheckpointError, reason

# Stem of a folder's weights, by the published naming; the first that is there is read.
NAMES = ("model.safetensors", "pytorch_model.bin")
CPU = torch.device("cpu")
Place = torch.device | Callable[[str], torch.device]
WRAPPERS = ("model", "module", "state_dict")  # what training code files its weights under in a .pt
WHOLE_DIGEST = 1 << 28  # bytes up to which every one counts in a digest
SAMPLE = 2048  # elements at either end of a tensor that count beyond


class Source(Protocol):
    """One opened file. Shapes and types are at hand, contents are read by name."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, name: str) -> Tensor:
        """The tensor as stored, possibly a view of the file."""


class Safetensors:
    """A .safetensors file, opened anew for each tensor: a mapping that stays open keeps every page it was
    read through, so that a model would stand in memory twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        with _reading(path), safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = _dtype_of(part.get_dtype(), path)

    def read(self, name: str) -> Tensor:
        """See Source."""
        with _reading(self.path), safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)


class Pickled:
    """A .bin, .pt or .ckpt file of torch.save (tensors only, never code); weights may lie under "model",
    "module" or "state_dict". Mapped from disk, except for files older than torch's zip format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on other pickle protocols; an error says what matters
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        for wrapper in WRAPPERS:
            if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not a table of tensors")
        self._tensors = {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, Tensor)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """See Source."""
        return self._tensors[name]


class Weights(Mapping[str, Tensor]):
    """A read-only table of tensors. Each access reads the tensor anew, on the device and in the type asked
    for; nothing is kept. KeyError names what is not there."""

    def __init__(
        self,
        places: Mapping[str, tuple[Source, str]],
        device: Place = CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        """places: name -> (file, its name there). device: where tensors go, one place or one by name. dtype:
        as what they are read; None: as stored. Integers keep their type."""
        self._places, self._device, self._dtype = places, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        source, stored = self._places[name]
        kind, device = self._type_of(source.dtypes[stored]), self._device_of(name)
        if device.type == "meta":  # a check of headers: nothing is read
            return torch.empty(source.shapes[stored], dtype=kind, device="meta")
        return source.read(stored).to(device, kind, copy=True)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The tensors one below the other, each read straight to its place: no part is held beside the
        whole."""
        files = [self._places[name] for name in names]
        shapes = [source.shapes[stored] for source, stored in files]
        source, stored = files[0]
        rows = [shape[0] for shape in shapes]
        whole = torch.empty(
            (sum(rows), *shapes[0][1:]),
            dtype=self._type_of(source.dtypes[stored]),
            device=self._device_of(names[0]),
        )
        for place, (source, stored) in zip(whole.split(rows), files, strict=True):
            if place.device.type != "meta":
                place.copy_(source.read(stored))
        return whole

    def _device_of(self, name: str) -> torch.device:
        """Where a tensor goes."""
        return self._device if isinstance(self._device, torch.device) else self._device(name)

    def _type_of(self, stored: torch.dtype) -> torch.dtype:
        """What a stored type is read as."""
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def placed(self, device: Place, dtype: torch.dtype) -> Weights:
        """The same tensors, read to that device, or those devices by name, in that type."""
        return Weights(self._places, device, dtype)

    def below(self, prefix: str) -> Weights:
        """The tensors whose names start with prefix, without it."""
        places = {n[len(prefix) :]: place for n, place in self._places.items() if n.startswith(prefix)}
        return Weights(places, self._device, self._dtype)

    def tied(self, fields: Mapping[str, Any]) -> Weights:
        """With the table of tokens as the head too, where config.json says so (tie_word_embeddings) and no
        head is stored, as transformers writes such models."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if not fields.get("tie_word_embeddings") or head in self or table not in self:
            return self
        return Weights({**self._places, head: self._places[table]}, self._device, self._dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, from the headers."""
        return {name: source.shapes[stored] for name, (source, stored) in self._places.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored, from the headers."""
        sizes = ((math.prod(s.shapes[n]), s.dtypes[n].itemsize) for s, n in self._places.values())
        return sum(count * size for count, size in sizes)

    def file_of(self, name: str) -> Path:
        """The file a tensor lies in."""
        return self._places[name][0].path

    def digest(self) -> str:
        """sha256, first 16 digits, over names and bytes of the weights as stored.

        Of more than WHOLE_DIGEST bytes, which would be read a second time for it: over names, types, shapes
        and the first and last SAMPLE elements of every tensor. Training changes all of these.
        """
        if any(self._device_of(name).type == "meta" for name in self._places):
            return "unread"
        digest, whole = hashlib.sha256(), self.nbytes <= WHOLE_DIGEST
        for name in sorted(self._places):
            source, stored = self._places[name]
            flat = source.read(stored).contiguous().view(-1)
            digest.update(name.encode())
            if not whole:
                digest.update(f"{flat.dtype}{source.shapes[stored]}".encode())
                flat = torch.cat((flat[:SAMPLE], flat[-SAMPLE:]))
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def stacked(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The named tensors of any table one below the other (Weights.stacked)."""
    return state.stacked(names) if isinstance(state, Weights) else torch.cat([state[name] for name in names])


def read_weights(path: Path) -> Weights:
    """The weights in a folder or in one file. CheckpointError names what is missing, truncated or damaged.

    A folder holds model.safetensors or pytorch_model.bin, or an index of shards of either.
    """
    if path.is_file():
        return _joined([_open(path)])
    for name in NAMES:
        index = path / f"{name}.index.json"
        if index.is_file():
            return _sharded(index)
        if (path / name).is_file():
            return _joined([_open(path / name)])
    raise CheckpointError(
        f"{path} holds no {' and no '.join(NAMES)}: give a checkpoint's folder, or fetch it"
    )


def _sharded(index: Path) -> Weights:
    """The tensors an index names, each from its shard."""
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(where.values()))
        paths = {name: index.parent / name for name in shards}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index of shards: fetch it again") from None
    sources: dict[str, Source] = {}
    faults: list[str] = []
    for name, path in paths.items():
        try:
            sources[name] = _open(path)
        except CheckpointError as error:
            faults.append(str(error))
    for name, shard in where.items():
        if shard in sources and name not in sources[shard].shapes:
            faults.append(
                f"{paths[shard]} lacks tensor {name}, which {index.name} says it holds: fetch both again"
            )
    if faults:
        more = f" (and {len(faults) - 1} more faults in {len(shards)} shards)" if len(faults) > 1 else ""
        raise CheckpointError(faults[0] + more, faults)
    return Weights({name: (sources[shard], name) for name, shard in where.items()})


def _joined(sources: list[Source]) -> Weights:
    return Weights({name: (source, name) for source in sources for name in source.shapes})


def _open(path: Path) -> Source:
    return Safetensors(path) if path.suffix == ".safetensors" else Pickled(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the file becomes a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: fetch it again") from None
    except pickle.UnpicklingError as error:  # torch's own message tells how to run the code in it
        if "Unsupported global" in str(error):
            what = "holds more than tensors, and no code is run from it: save its tensors alone"
        else:
            what = f"is no file of tensors{_kind(path)}: fetch it again"
        raise CheckpointError(f"{path} {what}") from None
    except (SafetensorError, RuntimeError, EOFError, OSError, KeyError, ValueError, IndexError) as error:
        what = f"cannot be read ({reason(error)}): truncated or damaged{_kind(path)}, fetch it again"
        raise CheckpointError(f"{path} {what}") from None


def _kind(path: Path) -> str:
    """What is often saved in the place of weights."""
    with path.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")):
        return " (it is a web page)"
    return " (it is a pointer of git-lfs)" if start.startswith(b"version https://git-lfs") else ""


def _dtype_of(name: str, path: Path) -> torch.dtype:
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
    text = names.get(name) or name.replace("U", "uint", 1).replace("I", "int", 1)
    try:
        return getattr(torch, text)
    except AttributeError:
        raise CheckpointError(f"{path} holds tensors of type {name}: only plain numbers are read") from None
