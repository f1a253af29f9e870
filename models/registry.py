"""Name or path -> a model: which family a checkpoint belongs to, and where the named ones lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from models import anole, llamagen_files, lumina_mgpt
from models.errors import CheckpointError
from models.hub import locate
from models.model import NO_EXTRAS, Extras, Model, Source

CKPTS = Path(__file__).resolve().parent.parent / "ckpts"
EMOJI = CKPTS / "emoji"
SPLIT = "split"  # a device: all GPUs, a part of the layers on each
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LLAMAGEN = ("llamagen", "llamagen2")
FAMILIES: dict[str, Callable[[Source], Model]] = {
    "emoji": anole.load,
    "anole": anole.load,
    "lumina_mgpt": lumina_mgpt.load,
    **dict.fromkeys(LLAMAGEN, llamagen_files.load),
}
# name -> where the target and its drafter lie unless the command line says otherwise
HOMES = {
    "emoji": (EMOJI, EMOJI / "drafter"),
    "anole": (CKPTS / "anole" / "Anole-7b-v0.1-hf", CKPTS / "anole" / "trained_drafters" / "anole_drafter"),
    "lumina_mgpt": (
        CKPTS / "lumina_mgpt" / "Lumina-mGPT-7B-768",
        CKPTS / "lumina_mgpt" / "trained_drafters",
    ),
    "llamagen": (
        CKPTS / "llamagen" / "LlamaGen-T2I",
        CKPTS / "llamagen" / "trained_drafters" / "llamagen_drafter",
    ),
    "llamagen2": (
        CKPTS / "llamagen" / "LlamaGen-T2I-2",
        CKPTS / "llamagen" / "trained_drafters" / "llamagen2_drafter",
    ),
}


def load(
    model: str,
    model_path: str | None,
    drafter_path: str | None,
    precision: str,
    device: str,
    need_drafter: bool,
    extras: Extras = NO_EXTRAS,
) -> Model:
    """Load the checkpoint of a model named in FAMILIES.

    model_path, drafter_path: paths or hub ids (models.hub), default the model's places in HOMES; a drafter
    beside its target, in the folder `drafter`, goes first. revision: of the hub id model_path. device: a
    torch device, or SPLIT (families of the Chameleon layout alone). Weights are cast to `precision` as they
    are read; the codec stays fp32. Raises CheckpointError.
    """
    if model not in FAMILIES:
        raise CheckpointError(f"there is no model {model}: choose one of {', '.join(FAMILIES)}")
    home, drafter_home = HOMES[model]
    folder = locate(model_path, extras.revision) if model_path else home
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist: fetch it by `bash scripts/get_ckpts.sh {model}`, or give "
            "--model_path (a folder or a hub id)"
        )
    drafter = None
    if need_drafter:
        beside = home_of(folder) / "drafter"
        drafter = locate(drafter_path) if drafter_path else beside if beside.is_dir() else drafter_home
    places = _places(model, folder, extras.tokenizer_base_path)
    split = device == SPLIT
    place = torch.device("cuda", 0) if split else torch.device(device)
    source = Source(model, folder, drafter, DTYPES[precision], place, extras, places, split)
    family = "llamagen" if model in LLAMAGEN else model
    tables = (home_of(folder), *([drafter] if drafter else []), CKPTS / family / "vq_distances")
    return replace(FAMILIES[model](source), tables=tables)


def home_of(target: Path) -> Path:
    """The folder of a target, which may be a file."""
    return target.parent if target.is_file() else target


def _places(model: str, folder: Path, base: str | None) -> tuple[Path, ...]:
    """Folders where the files beside a target's own are looked for: text_tokenizer.json, vqgan.ckpt and
    vqgan.yaml in the one given alone, else in the target's own and the published layout's; LlamaGen's VQ
    model and text encoder in its folder, the one around it and the published layout's."""
    if model in LLAMAGEN:
        return home_of(folder), folder.parent, CKPTS / "llamagen"
    inner = Path("chameleon", "tokenizer")
    if base is not None:
        return Path(base), Path(base) / inner
    return folder, folder.parent / inner, CKPTS / model / inner
