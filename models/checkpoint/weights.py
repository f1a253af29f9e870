"""The tensors of a checkpoint by name, each read from disk when it is asked for and placed where it belongs.

Opening a file reads its header only: names, shapes and sizes are known, and a missing or truncated file is
refused, before any weights are read. No code in a file is run, and no file outside the folder is opened.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from adt_tree.errors import CheckpointError
from models.checkpoint.config import ADAPTER
from models.checkpoint.files import read_json, reading

# A folder's weights, under the published names: the first that is there is read, whole or in shards.
NAMES = ("model.safetensors", "pytorch_model.bin")
CPU = torch.device("cpu")
# What DDP, torch.compile, FSDP and peft put into the names of a model's tensors.
WRAPPED = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module)\.|^base_model\.model\.")
WRAPPERS = ("model", "module", "state_dict")  # keys under which training code stores the weights in a .pt
WHOLE_DIGEST = 1 << 28  # bytes up to which a digest covers all of them
SAMPLE = 2048  # elements at either end of each tensor that a digest of larger weights covers


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file as its header describes it, or of a model in memory."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None  # of a .pt file (mapped) or a model in memory; None: read it from `path`
    shared: bool = False  # belongs to a model in memory: not copied if device and type fit

    def read(self) -> Tensor:
        """Returns the tensor as stored; it may be a view of the file.

        A .safetensors file is opened anew for each tensor. A mapping that stays open keeps every page that
        was read through it, so that the model would occupy memory twice.
        """
        if self.tensor is not None:
            return self.tensor.detach()
        with reading(self.path), safe_open(self.path, framework="pt") as file:
            tensor = file.get_tensor(self.name)
        return tensor


class Weights(Mapping[str, Tensor]):
    """A read-only mapping of names to tensors. Every access reads the tensor again."""

    def __init__(
        self, stored: Mapping[str, Stored], device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> None:
        """Tensors are read to `device`, floating-point ones as `dtype`; None keeps the stored type."""
        self._stored, self.device, self.dtype = stored, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        if self.device.type == "meta":  # a check of headers, which must not read any weights
            return torch.empty(stored.shape, dtype=self._dtype_of(stored), device=self.device)
        return stored.read().to(self.device, self._dtype_of(stored), copy=not stored.shared)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the inherited method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Returns these tensors concatenated along their rows.

        Each is read straight into its place, so that memory never holds a tensor beside the result.
        """
        parts = [self._stored[name] for name in names]
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        result = torch.empty(shape, dtype=self._dtype_of(parts[0]), device=self.device)
        if self.device.type != "meta":
            for place, part in zip(result.split(rows), parts, strict=True):
                place.copy_(part.read())
        return result

    def share(self, views: Mapping[str, Tensor]) -> None:
        """Makes parameters of a model in memory views of our tensors, so that memory holds them once.

        Tensors of files are left alone.
        """
        for name, view in views.items():
            stored = self._stored[name]
            if stored.shared and stored.tensor is not None and stored.dtype == view.dtype:
                stored.tensor.data = view

    def _dtype_of(self, stored: Stored) -> torch.dtype:
        return self.dtype if self.dtype is not None and stored.dtype.is_floating_point else stored.dtype

    def placed(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Returns the same tensors, to be read to that device as that type."""
        return Weights(self._stored, device, dtype)

    def below(self, prefix: str) -> Weights:
        """Returns the tensors whose names start with the prefix, named without it."""
        return self.renamed({name[len(prefix) :]: name for name in self if name.startswith(prefix)})

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """Returns only these tensors, under new names (new -> present). KeyError names a missing one."""
        return Weights({new: self._stored[name] for new, name in names.items()}, self.device, self.dtype)

    def beside(self, more: Weights) -> Weights:
        """Returns these tensors, and those of `more` that are not here."""
        return Weights({**more._stored, **self._stored}, self.device, self.dtype)

    @property
    def in_memory(self) -> bool:
        """True if these are the tensors of a model in memory, which its owner goes on using."""
        return any(stored.shared for stored in self._stored.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, from the headers."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def digest(self) -> str:
        """Returns the first 16 digits of a sha256 over the names and bytes of the weights as stored.

        Weights of more than WHOLE_DIGEST bytes would have to be read a second time. For them the digest
        covers names, types, shapes and the first and last SAMPLE elements of every tensor: training changes
        these.
        """
        if self.device.type == "meta":
            return "unread"
        sizes = (math.prod(stored.shape) * stored.dtype.itemsize for stored in self._stored.values())
        digest, whole = hashlib.sha256(), sum(sizes) <= WHOLE_DIGEST
        for name, stored in sorted(self._stored.items()):
            flat = stored.read().reshape(-1)
            digest.update(name.encode())
            if not whole:
                digest.update(f"{flat.dtype}{stored.shape}".encode())
                flat = torch.cat((flat[:SAMPLE], flat[-SAMPLE:]))
            digest.update(flat.cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def read_weights(path: Path) -> Weights:
    """Opens the weights in a file or in a folder, which may hold them in shards.

    Raises CheckpointError that names what is missing, truncated or damaged.
    """
    if path.is_file():
        return Weights(_open(path))
    for name in NAMES:  # the order of transformers, and a whole file before an index
        if (path / name).is_file():
            return Weights(_open(path / name))
        if (path / f"{name}.index.json").is_file():
            return _open_shards(path / f"{name}.index.json")
    raise CheckpointError(
        f"{path} holds no {' and no '.join(NAMES)}: give a checkpoint's folder, or fetch it"
    )


def weights_in_memory(model: nn.Module, name: Path) -> Weights:
    """Returns the tensors of a model that is loaded already; error messages call it `name`."""
    # The state dict holds copies of the parameters' handles; share() needs the parameters themselves.
    tensors = model.state_dict() | dict(model.named_parameters())
    stored = (Stored(name, n, tuple(t.shape), t.dtype, t, shared=True) for n, t in tensors.items())
    return Weights(_unwrapped(name, stored))


def weights_file(folder: Path) -> Path:
    """Returns the weights to read for a path: the .pt file in it, if it is a folder that holds exactly one
    and no weights under the usual names; otherwise the path itself. VQ models (vq_*.pt) do not count."""
    inside = sorted(folder.glob("*.pt")) if folder.is_dir() else []
    inside = [path for path in inside if not path.name.startswith("vq_")]
    if any(folder.glob("model*.safetensors*")) or any(folder.glob("pytorch_model*")) or len(inside) != 1:
        return folder
    return inside[0]


def _open_shards(index: Path) -> Weights:
    """Opens the shards that an index names, which must lie in its folder or below it."""
    content = read_json(index)
    with reading(index):
        where = {WRAPPED.sub("", name): shard for name, shard in dict(content["weight_map"]).items()}
        paths = {shard: index.parent / shard for shard in where.values()}
    for shard in paths:
        # We compare names, not resolved paths: the hub's cache keeps a folder's files elsewhere, behind
        # links.
        if PurePosixPath(shard).is_absolute() or {"..", "\\"} & {*PurePosixPath(shard).parts, *shard}:
            raise CheckpointError(
                f"{index}: names a shard outside its folder ({shard!r:.80}): fetch it again"
            )
    opened: dict[str, dict[str, Stored]] = {}
    faults: list[str] = []
    for shard, path in sorted(paths.items()):
        try:
            opened[shard] = _open(path)
        except CheckpointError as error:
            faults.append(str(error))
    faults += [
        f"{paths[shard]}: tensor {name} is missing, which {index.name} says it holds: fetch both again"
        for name, shard in where.items()
        if shard in opened and name not in opened[shard]
    ]
    if faults:
        more = f" (and {len(faults) - 1} more faults in {len(paths)} shards)" if len(faults) > 1 else ""
        raise CheckpointError(faults[0] + more, faults)
    return Weights({name: opened[shard][name] for name, shard in where.items()})


def _open(path: Path) -> dict[str, Stored]:
    """Reads the header of a file: a .safetensors file, or one that torch.save wrote."""
    with reading(path):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                stored = [
                    Stored(path, name, tuple(part.get_shape()), _dtype(part.get_dtype()))
                    for name, part in parts.items()
                ]
            return _unwrapped(path, stored)
        content = _unpickle(path)
        for wrapper in WRAPPERS:
            if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if not isinstance(content, dict):
            raise ValueError(f"holds a {type(content).__name__}, not tensors by name")
    tensors = {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, Tensor)}
    return _unwrapped(path, [Stored(path, n, tuple(t.shape), t.dtype, t) for n, t in tensors.items()])


def _unwrapped(path: Path, stored: Iterable[Stored]) -> dict[str, Stored]:
    """Returns tensors by their names in the model itself. CheckpointError if an adapter is among them."""
    tensors = {WRAPPED.sub("", part.name): part for part in stored}
    if any("lora_" in name or ".base_layer." in name for name in tensors):
        raise CheckpointError(f"{path} {ADAPTER}")
    return tensors


def _unpickle(path: Path) -> Any:
    """Returns the content of a file of torch.save, mapped from disk unless the file has torch's old format.

    No code is run. The errors of torch explain how to run the code in the file, so ValueErrors replace them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other pickle protocols: the error that follows is enough
        try:
            with torch.serialization.safe_globals([Namespace]):  # of the options of LlamaGen's training
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # damaged bytes lead the unpickler to exceptions of any class
            if "GLOBAL" in str(error) or "reduce" in str(error):
                raise ValueError("holds code beside its tensors, which is never run") from error
            raise ValueError("is not a file of torch.save, or is damaged or truncated") from error


def _dtype(name: str) -> torch.dtype:
    """Returns the type that a .safetensors header names. Raises ValueError for packed types."""
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
    dtype = getattr(torch, names.get(name) or name.replace("U", "uint", 1).replace("I", "int", 1), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"holds tensors of type {name}: quantised or packed numbers are not supported")
    return dtype
