"""Tensors of a checkpoint by name, read from disk when asked for and put where they belong at once.

Opening a file reads headers only: names, shapes and sizes are known, and a missing or truncated file is
found, before a byte of weights is read. No code is run from a file, and none outside the folder is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from adt_tree.errors import CheckpointError, reason

# Stem of a folder's weights, by the published naming; the first that is there is read.
NAMES = ("model.safetensors", "pytorch_model.bin")
CPU = torch.device("cpu")
WRAPPERS = ("model", "module", "state_dict")  # what training code files its weights under in a .pt
WHOLE_DIGEST = 1 << 28  # bytes up to which every one counts in a digest
SAMPLE = 2048  # elements at either end of a tensor that count beyond


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: all but its contents is known from the header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None  # a view of the mapped file; None: the file is opened to read it
    shared: bool = False  # of a model in memory: handed out as it is where device and type fit

    def read(self) -> Tensor:
        """As stored, possibly a view of the file. A .safetensors is opened anew for each tensor: a mapping
        that stays open keeps every page it was read through, so that a model would stand in memory twice."""
        if self.tensor is not None:
            return self.tensor.detach()
        with _reading(self.path), safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


class Weights(Mapping[str, Tensor]):
    """A read-only table of tensors, each read anew at every access. KeyError names what is not there."""

    def __init__(
        self, stored: Mapping[str, Stored], device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> None:
        """device: where tensors go. dtype: of floating-point ones when read; None: as stored."""
        self._stored, self.device, self.dtype = stored, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        if self.device.type == "meta":  # a check of headers: nothing is read
            return torch.empty(stored.shape, dtype=self._type_of(stored), device=self.device)
        return stored.read().to(self.device, self._type_of(stored), copy=not stored.shared)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The tensors one below the other, each read straight to its place, none held beside the whole."""
        parts = [self._stored[name] for name in names]
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        whole = torch.empty(shape, dtype=self._type_of(parts[0]), device=self.device)
        if self.device.type != "meta":
            for place, part in zip(whole.split(rows), parts, strict=True):
                place.copy_(part.read())
        return whole

    def share(self, views: Mapping[str, Tensor]) -> None:
        """Let parameters of a model in memory, not of files, become views of ours: neither stands twice."""
        for name, view in views.items():
            stored = self._stored[name]
            if stored.shared and stored.tensor is not None and stored.dtype == view.dtype:
                stored.tensor.data = view

    def _type_of(self, stored: Stored) -> torch.dtype:
        return self.dtype if self.dtype is not None and stored.dtype.is_floating_point else stored.dtype

    def placed(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """The same tensors, read to that device in that type."""
        return Weights(self._stored, device, dtype)

    def below(self, prefix: str) -> Weights:
        """The tensors whose names start with prefix, without it."""
        return self.renamed({name[len(prefix) :]: name for name in self if name.startswith(prefix)})

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """These tensors alone, under new names (new -> present). KeyError names what is not there."""
        found = {new: self._stored[name] for new, name in names.items()}
        return Weights(found, self.device, self.dtype)

    def beside(self, more: Weights) -> Weights:
        """With those of `more` that are missing here."""
        return Weights({**more._stored, **self._stored}, self.device, self.dtype)

    def tied(self, fields: Mapping[str, Any]) -> Weights:
        """With the table of tokens as the head too, where config.json says so (tie_word_embeddings) and no
        head is stored, as transformers writes such models."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if not fields.get("tie_word_embeddings") or head in self or table not in self:
            return self
        return Weights({**self._stored, head: self._stored[table]}, self.device, self.dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, from the headers."""
        return {name: stored.shape for name, stored in self._stored.items()}

    @property
    def in_memory(self) -> bool:
        """Whether these are tensors of a model that somebody else keeps, not of files."""
        return any(stored.shared for stored in self._stored.values())

    def file_of(self, name: str) -> Path:
        """The file a tensor lies in."""
        return self._stored[name].path

    def digest(self) -> str:
        """sha256, first 16 digits, over names and bytes of the weights as stored.

        Of more than WHOLE_DIGEST bytes, which would be read a second time for it: over names, types, shapes
        and the first and last SAMPLE elements of every tensor. Training changes all of these.
        """
        if self.device.type == "meta":
            return "unread"
        sizes = (math.prod(stored.shape) * stored.dtype.itemsize for stored in self._stored.values())
        digest, whole = hashlib.sha256(), sum(sizes) <= WHOLE_DIGEST
        for name, stored in sorted(self._stored.items()):
            flat = stored.read().cpu().contiguous().view(-1)
            digest.update(name.encode())
            if not whole:
                digest.update(f"{flat.dtype}{stored.shape}".encode())
                flat = torch.cat((flat[:SAMPLE], flat[-SAMPLE:]))
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def read_weights(path: Path) -> Weights:
    """The weights in a folder or in one file. CheckpointError names what is missing, truncated or damaged.

    A folder holds model.safetensors or pytorch_model.bin, or an index of shards of either.
    """
    if path.is_file():
        return Weights(_open(path))
    for name in NAMES:
        index = path / f"{name}.index.json"
        if index.is_file():
            return _sharded(index)
        if (path / name).is_file():
            return Weights(_open(path / name))
    raise CheckpointError(
        f"{path} holds no {' and no '.join(NAMES)}: give a checkpoint's folder, or fetch it"
    )


def weights_in_memory(model: nn.Module, name: Path) -> Weights:
    """The tensors of a model that somebody else has loaded; name: what error messages call it."""
    tensors = model.state_dict() | dict(model.named_parameters())  # a state dict has copies of the handles
    return Weights({n: Stored(name, n, tuple(t.shape), t.dtype, t, shared=True) for n, t in tensors.items()})


def weights_file(folder: Path) -> Path:
    """The .pt of a folder that holds one and no weights under the usual names; else the path itself."""
    inside = sorted(folder.glob("*.pt")) if folder.is_dir() else []
    inside = [path for path in inside if not path.name.startswith("vq_")]
    if any(folder.glob("model*.safetensors*")) or any(folder.glob("pytorch_model*")) or len(inside) != 1:
        return folder
    return inside[0]


def _sharded(index: Path) -> Weights:
    """The tensors an index names, each from its shard; shards lie in the index's folder or below it."""
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(where.values()))
        paths = {name: index.parent / name for name in shards}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index of shards: fetch it again") from None
    for name in shards:
        # By its words: the hub's cache keeps a folder's files elsewhere, behind links.
        if PurePosixPath(name).is_absolute() or {"..", "\\"} & {*PurePosixPath(name).parts, *name}:
            raise CheckpointError(
                f"{index} names a shard outside its folder ({name!r:.80}): it is not opened; fetch the index "
                "again"
            )
    found: dict[str, dict[str, Stored]] = {}
    faults: list[str] = []
    for name, path in paths.items():
        try:
            found[name] = _open(path)
        except CheckpointError as error:
            faults.append(str(error))
    faults += [
        f"{paths[shard]} lacks tensor {name}, which {index.name} says it holds: fetch both again"
        for name, shard in where.items()
        if shard in found and name not in found[shard]
    ]
    if faults:
        more = f" (and {len(faults) - 1} more faults in {len(shards)} shards)" if len(faults) > 1 else ""
        raise CheckpointError(faults[0] + more, faults)
    return Weights({name: found[shard][name] for name, shard in where.items()})


def _open(path: Path) -> dict[str, Stored]:
    """The tensors of a file: of a .safetensors, or of torch.save (never code; weights may lie under "model",
    "module" or "state_dict"), which is mapped from disk unless it is older than torch's zip format."""
    with _reading(path), warnings.catch_warnings():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}
                return {
                    name: Stored(path, name, tuple(part.get_shape()), _dtype_of(part.get_dtype(), path))
                    for name, part in parts.items()
                }
        warnings.simplefilter("ignore")  # of other pickle protocols: the error that follows says enough
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a table of tensors")
    return {
        name: Stored(path, name, tuple(tensor.shape), tensor.dtype, tensor)
        for name, tensor in content.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the file becomes a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: fetch it again") from None
    except CheckpointError:
        raise
    except Exception as error:  # whatever damaged bytes lead torch's unpickler to
        raise CheckpointError(f"{path} {_fault(path, error)}") from None


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file, without torch's own words where they explain how to run the code in it."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError:
        start = b""
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of git-lfs, not the weights: fetch the file itself (git lfs pull)"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, not weights: fetch it again (a page comes where a login or licence is wanted)"
    if isinstance(error, SafetensorError | OSError | EOFError) or "weights_only" not in str(error):
        if path.suffix != ".safetensors" and isinstance(error, LookupError | TypeError | AttributeError):
            return "is no file of torch.save: fetch it again"
        return f"cannot be read ({reason(error)}): truncated or damaged, fetch it again"
    if "GLOBAL" in str(error) or "reduce" in str(error):
        return "holds more than tensors, and no code is run from it: save its tensors alone"
    return "is no file of torch.save, or damaged: fetch it again"


def _dtype_of(name: str, path: Path) -> torch.dtype:
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
    text = names.get(name) or name.replace("U", "uint", 1).replace("I", "int", 1)
    try:
        return getattr(torch, text)
    except AttributeError:
        raise CheckpointError(f"{path} holds tensors of type {name}: only plain numbers are read") from None
