"""Name, folder or hub id -> a loaded model, with device, precision and alignment chosen.

Whatever cannot be loaded is a CheckpointError of one line, raised before anything large is read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from adt_tree.errors import CheckpointError
from models.alignment import choose_alignment
from models.checkpoint.config import read_config
from models.checkpoint.hub import HubId, locate
from models.checkpoint.weights import read_weights, weights_file
from models.model import DTYPES, Model
from models.packed import row_invariant
from models.registry import SPECS
from models.spec import PRECISIONS, Checkpoint, LoadOptions, ModelSpec, home_of

DEFAULTS = LoadOptions()


def load(model: str = "emoji", options: LoadOptions = DEFAULTS) -> Model:
    """Load a model: a family of models.registry, or the folder or hub id of a checkpoint of one.

    Weights are cast to the precision as they are read; the codec stays fp32. A drafter beside its target, in
    the folder `drafter`, goes before the family's own. Raises CheckpointError.
    """
    spec, options = _family(model, options)
    device = pick_device(options.device)
    precision = pick_precision(options.precision, device, spec)
    if options.attention != "sdpa":
        _check_attention(options, device, precision, spec)
    loaded = spec.load(find_files(spec, options, device, precision))
    if options.deterministic:
        _check_deterministic(loaded, options, device)
    loaded = replace(loaded, attention=options.attention, deterministic=options.deterministic)
    return choose_alignment(loaded, options.alignment, options.guidance)


def _family(model: str, options: LoadOptions) -> tuple[ModelSpec, LoadOptions]:
    """The family that `model` names or whose checkpoint it is, and options with its model_path."""
    if model in SPECS:
        return SPECS[model], options
    path = Path(model)
    if options.model_path is not None or not (path.exists() or HubId.read(model)):
        raise CheckpointError(
            f"there is no model {model}: choose one of {', '.join(SPECS)}, "
            "or give a folder or a hub id OWNER/NAME"
        )
    folder = locate(model, options.revision)
    return detect(folder), replace(options, model_path=str(folder), revision=None)


def detect(folder: Path) -> ModelSpec:
    """The family of the checkpoint in a folder or file, from its config.json and the headers of its weights.
    CheckpointError if it is of none, or could be of two."""
    file, home = weights_file(folder), home_of(folder)
    fields = read_config(home) if file.is_dir() or (home / "config.json").is_file() else {}
    shapes = read_weights(file).shapes
    found = [spec for spec in SPECS.values() if spec.recognises(fields, shapes)]
    if len(found) != 1:
        raise CheckpointError(
            f"{folder}: its files do not tell which model it is: give it as --model_path beside one of "
            f"--model {', '.join(SPECS)}"
        )
    return found[0]


def find_target(spec: ModelSpec, options: LoadOptions) -> Path:
    """Where the target is: as given, in the family's folder, or fetched from the hub."""
    folder = spec.target_folder
    given = options.model_path or (None if folder.exists() else spec.hub)
    return locate(given, options.revision) if given else folder


def find_files(spec: ModelSpec, options: LoadOptions, device: str, precision: str) -> Checkpoint:
    """Where the files are, hub ids fetched. CheckpointError if the target is nowhere."""
    folder = find_target(spec, options)
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist: fetch it by `bash scripts/get_ckpts.sh {spec.name}`, or give "
            "--model_path (a folder or a hub id)"
        )
    drafter = None
    if options.need_drafter:
        drafter = locate(options.drafter_path) if options.drafter_path else drafter_folder(spec, folder)
    return Checkpoint(spec, folder, drafter, DTYPES[precision], torch.device(device), options)


def drafter_folder(spec: ModelSpec, target: Path) -> Path:
    """Where a target's drafter lies unless the options say so: beside it, else in the family's home."""
    beside = home_of(target) / "drafter"
    return beside if beside.is_dir() else spec.drafter_folder


def pick_device(name: str) -> str:
    """auto -> cuda where there is one, that of this process's local rank under a launcher; meta: headers.

    CheckpointError for a device that is unknown or missing, or if the machine has fewer than processes.
    """
    if name in ("cpu", "meta"):
        return name
    if name not in ("auto", "cuda") and not (name.startswith("cuda:") and name[5:].isdecimal()):
        raise CheckpointError(f"--device {name}: choose auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        if name == "auto":
            return "cpu"
        raise CheckpointError(f"--device {name}: no CUDA device is visible; use --device cpu or auto")
    visible = torch.cuda.device_count()
    if name.startswith("cuda:"):
        if int(name[5:]) >= visible:
            raise CheckpointError(f"--device {name}: {visible} CUDA devices are visible; they count from 0")
        return name
    if "WORLD_SIZE" in os.environ:  # a launcher's: accelerate launch, torchrun
        place = os.environ.get("LOCAL_RANK", "0")
        if not place.isdecimal():
            raise CheckpointError(
                f"LOCAL_RANK={place!r}: the launcher's variable is no number; unset it or repair it"
            )
        if int(place) >= visible:
            raise CheckpointError(
                f"--device {name}: LOCAL_RANK={place}, but {visible} CUDA devices are visible; launch a "
                "process per device"
            )
        torch.cuda.set_device(int(place))
    return "cuda"


def pick_precision(name: str, device: str, spec: ModelSpec) -> str:
    """auto -> bf16 where the device multiplies it in hardware, else fp16 on a GPU and fp32, which beats
    emulated bf16, on a CPU; always fp32 on a CPU for families whose images are compared there."""
    if name not in PRECISIONS:
        raise CheckpointError(f"--precision {name}: choose one of {', '.join(PRECISIONS)}")
    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    multiplied = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bf16" if multiplied and not spec.fp32_on_cpu else "fp32"


def _check_attention(options: LoadOptions, device: str, precision: str, spec: ModelSpec) -> None:
    """CheckpointError for flash-attn where it is missing or cannot attend."""
    given = f"--attention {options.attention}"
    if options.attention != "flash":
        raise CheckpointError(f"{given}: choose sdpa or flash")
    if not device.startswith("cuda") or precision == "fp32":
        raise CheckpointError(f"{given}: flash-attn needs a CUDA device and fp16 or bf16; leave it out")
    if spec.embedded_prompts:
        raise CheckpointError(f"{given}: padded prompts are read by sdpa; leave it out")
    if find_spec("flash_attn") is None:
        raise CheckpointError(f"{given}: flash-attn is not installed; install it, or leave the option out")


def _check_deterministic(model: Model, options: LoadOptions, device: str) -> None:
    """CheckpointError where rows of a pass would influence one another all the same."""
    given = "--deterministic"
    if device != "cpu" or options.attention != "sdpa":
        raise CheckpointError(f"{given}: it is made for --device cpu and --attention sdpa; leave it out")
    if not row_invariant(model.decoder):
        raise CheckpointError(
            f"{given}: this CPU's products in {model.precision} depend on how many rows share a pass; choose "
            "another --precision, or leave it out"
        )
