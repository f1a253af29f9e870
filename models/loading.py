"""Loads a model by its name, folder or hub id, and chooses its device and precision.

A checkpoint that cannot be loaded raises CheckpointError, one line for the user.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from adt_tree.errors import CheckpointError
from adt_tree.surroundings import own_settings
from models.checkpoint.config import read_config
from models.checkpoint.files import expanded
from models.checkpoint.hub import HubId, locate
from models.checkpoint.weights import read_weights, weights_file
from models.family import DEFAULTS, PRECISIONS, Checkpoint, LoadOptions, ModelFamily, home_of
from models.model import DTYPES, Model
from models.registry import SPECS

# A launcher's number of a process on its machine: accelerate launch and torchrun, Open MPI, MPICH, srun.
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def load(model: str | os.PathLike[str], options: LoadOptions = DEFAULTS) -> Model:
    """Loads the model that `model` names: a family of models.registry, or a checkpoint's folder or hub id.

    Weights are cast to the precision as they are read; the codec stays fp32. Raises CheckpointError.
    """
    spec, options = _family(expanded(model), options)
    of_families = dict.fromkeys(name for other in SPECS.values() for name in other.options)
    for name in filter(partial(hasattr, DEFAULTS), of_families):
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name) and name not in spec.options:
            raise CheckpointError(f"{name} {value}: {spec.name} does not read it; leave it out")
    device = pick_device(options.device)
    graphs = pick_graphs(options.cuda_graphs, device)
    precision = pick_precision(options.precision, device, spec)
    with own_settings():
        loaded = spec.reader.load(find_files(spec, options, device, precision))
    return replace(loaded, graphs=graphs)


def _family(model: str, options: LoadOptions) -> tuple[ModelFamily, LoadOptions]:
    """Returns the family that `model` names or belongs to, and the options with the checkpoint's path."""
    if model in SPECS:
        return SPECS[model], options
    path, hub_id = Path(model), HubId.read(model)
    published = [spec for spec in SPECS.values() if hub_id and spec.target and spec.target.hub == hub_id.repo]
    if published and options.model_path is None and not path.exists():
        return published[0], replace(options, model_path=model)
    if options.model_path is not None or not (path.exists() or hub_id):
        raise CheckpointError(
            f"there is no model {model}: choose one of {', '.join(SPECS)}, or give a folder or a hub id "
            "OWNER/NAME"
        )
    folder = component(locate(model, options.revision))
    return detect(folder), replace(options, model_path=str(folder), revision=None)


def component(folder: Path) -> Path:
    """Returns the model's own folder in a repository that holds other parts too (ModelFamily.parts), or else
    the folder itself."""
    inner = (folder / spec.parts[0] for spec in SPECS.values() if spec.parts)
    return next((path for path in inner if path.is_dir()), folder)


def detect(folder: Path) -> ModelFamily:
    """Returns the family of a checkpoint, recognised by its config.json and the headers of its weights.

    Raises CheckpointError if no family, or more than one, recognises it.
    """
    file, home = weights_file(folder), home_of(folder)
    fields = read_config(home) if file.is_dir() or (home / "config.json").is_file() else {}
    shapes = read_weights(file).shapes
    specs = [spec for spec in SPECS.values() if spec.matches(fields, shapes)]
    if len(specs) != 1:
        raise CheckpointError(
            f"{folder}: its files do not tell which model it is: give it as model_path, and its family as "
            f"model ({', '.join(SPECS)})"
        )
    return specs[0]


def find_target(spec: ModelFamily, options: LoadOptions) -> Path:
    """Returns the target's path: model_path, or the family's folder, or else what the hub has."""
    folder = spec.target_folder
    place = options.model_path or (None if folder.exists() else spec.hub)
    return component(locate(place, options.revision, spec.parts) if place else folder)


def find_files(spec: ModelFamily, options: LoadOptions, device: str, precision: str) -> Checkpoint:
    """Returns the paths of the model's files, and fetches hub ids. CheckpointError if there is no target."""
    folder = find_target(spec, options)
    if not folder.exists():
        fetch = f"fetch it by `bash scripts/get_ckpts.sh {spec.name}`, or " if spec.target else ""
        raise CheckpointError(f"{folder} does not exist: {fetch}give model_path (a folder or a hub id)")
    drafter = None if options.need_drafter is False else drafter_folder(spec, folder, options)
    return Checkpoint(spec, folder, drafter, DTYPES[precision], torch.device(device), options)


def drafter_folder(spec: ModelFamily, target: Path, options: LoadOptions) -> Path | None:
    """Returns the folder of a target's drafter: drafter_path, which may be a hub id, or `drafter` beside
    the target, or, for the family's own target alone, the family's. None if there is none."""
    if options.drafter_path:
        return locate(options.drafter_path)
    places = [home_of(target) / "drafter", *([] if options.model_path else [spec.drafter_folder])]
    return next((folder for folder in places if folder.is_dir()), None)


def pick_device(name: str) -> str:
    """Returns the device of that name; auto is cuda if there is one, and else cpu.

    Under a launcher, cuda is the device of this process's local rank, which becomes the current one. On the
    device meta a model has shapes but no weights: check_ckpts uses it. Raises CheckpointError for an unknown
    or missing device.
    """
    if name in ("cpu", "meta"):
        return name
    if name not in ("auto", "cuda") and not (name.startswith("cuda:") and name[5:].isdecimal()):
        raise CheckpointError(f"device {name}: choose auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        if name == "auto":
            return "cpu"
        raise CheckpointError(f"device {name}: no CUDA device is visible; use device cpu or auto")
    visible = torch.cuda.device_count()
    if name.startswith("cuda:"):
        if int(name[5:]) >= visible:
            raise CheckpointError(f"device {name}: {visible} CUDA devices are visible; they count from 0")
        return name
    variable = next((variable for variable in LOCAL_RANKS if variable in os.environ), None)
    if variable is not None:
        # srun and mpirun may show each process its own device alone.
        index = 0 if visible == 1 and variable != "LOCAL_RANK" else int(os.environ[variable])
        torch.cuda.set_device(index)
    return "cuda"


def pick_graphs(asked: bool | None, device: str) -> bool:
    """Returns whether parts of a step are replayed as CUDA graphs: by default on every CUDA device.
    CheckpointError if they are asked for elsewhere."""
    on_cuda = device.startswith("cuda")
    if asked and not on_cuda:
        raise CheckpointError(f"cuda_graphs: this runs on {device}, which has none; leave it out")
    return on_cuda if asked is None else asked


def pick_precision(name: str, device: str, spec: ModelFamily) -> str:
    """Returns the precision of that name.

    auto is bf16 if the device multiplies it in hardware, else fp16 on a GPU, and on a CPU fp32, which is
    faster there than emulated bf16. A family with fp32_on_cpu has fp32 on every CPU.
    """
    if name not in PRECISIONS:
        raise CheckpointError(f"precision {name}: choose one of {', '.join(PRECISIONS)}")
    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    in_hardware = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bf16" if in_hardware and not spec.fp32_on_cpu else "fp32"
