"""Loads the model that a command's options name."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from adt_tree.errors import UserError, as_seed
from adt_tree.pipeline import Pipeline
from cli.options import (
    FileOptions,
    FilterOptions,
    GraphOptions,
    ModelOptions,
    PromptOptions,
    TargetOptions,
    sampling_defaults,
)
from models.family import LoadOptions
from models.loading import find_target, pick_device, pick_graphs
from models.loading import load as load_model
from models.model import Model
from models.registry import SPECS
from storage.command_line import CommandOptions
from storage.process import refuse_several

if TYPE_CHECKING:
    from eval.metrics.recogniser import Recogniser

LOAD_FIELDS = frozenset(field.name for field in fields(LoadOptions))


def resolved_options(options: CommandOptions, model: Model) -> dict[str, Any]:
    """Returns the options for JSON, with the values in use in place of "auto" and the model's defaults."""
    in_use = {"device": model.device.type, "precision": model.precision, "cuda_graphs": model.graphs}
    if isinstance(options, FilterOptions):
        own = sampling_defaults(model.spec)
        in_use |= {name: value for name, value in own.items() if getattr(options, name, 0) is None}
    return {name: in_use.get(name, value) for name, value in asdict(options).items()}


def compiled(options: TargetOptions) -> bool:
    """Returns whether functions are compiled, which not every command offers. Raises UserError for --compile
    without CUDA graphs."""
    if not isinstance(options, GraphOptions) or not options.compile:
        return False
    if not pick_graphs(options.cuda_graphs, pick_device(options.device)):
        raise UserError("--compile: it needs CUDA graphs, which are off or missing here; leave it out")
    return True


def load_options(options: FileOptions, need_drafter: bool | None = False) -> LoadOptions:
    """Returns the options of loading; those that a command does not offer keep their defaults."""
    values = {name: value for name, value in asdict(options).items() if name in LOAD_FIELDS}
    return LoadOptions(**values, need_drafter=need_drafter)


def load(options: TargetOptions, need_drafter: bool | None, more_prompts: bool = False) -> Pipeline:
    """Returns the model that the options name, ready to decode.

    more_prompts: the text encoder stays in memory, because prompts will follow the first images. Raises
    UserError for a bad checkpoint or size.
    """
    prompts = options if isinstance(options, PromptOptions) else None
    if prompts and prompts.set_seed:
        torch.manual_seed(as_seed(prompts.random_seed))
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    loading = replace(load_options(options, need_drafter), keep_text_encoder=more_prompts)
    asked = compiled(options)  # refused before weights are read
    model = replace(load_model(options.model, loading), compiled=asked)
    if prompts and prompts.class_labels and not model.prompts.num_classes:
        raise UserError(f"--class_labels: {options.model_path or model.name} takes texts; give --prompt")
    return Pipeline(model)


def load_without_drafter(options: TargetOptions) -> Pipeline:
    """Returns the model for a command that uses no drafter and runs in one process."""
    refuse_several()
    return load(options, need_drafter=False)


def load_with_drafter_if_any(options: ModelOptions) -> Pipeline:
    """Returns the model with its drafter network, if there is one."""
    return load(options, need_drafter=None, more_prompts=True)


def recogniser_of(options: ModelOptions) -> Recogniser | None:
    """Returns the recogniser of images of the checkpoint; None if its folder holds no gallery.

    Raises UserError if the package of its network is not installed.
    """
    from eval.metrics.recogniser import GALLERY, Recogniser

    gallery = find_target(SPECS[options.model], load_options(options)) / GALLERY
    if not gallery.exists():
        if options.model == "emoji":
            print(f"{gallery} is missing: images are not recognised", file=sys.stderr)
        return None
    return Recogniser(gallery)
