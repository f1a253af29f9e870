"""Loads the model that a command's options name."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import torch

from adt_tree.errors import UserError
from adt_tree.pipeline import Pipeline
from cli.options import (
    CheckpointOptions,
    FilterOptions,
    GraphOptions,
    ModelOptions,
    PromptOptions,
    check_model,
)
from cli.parser import Options, shown
from models.loading import load as load_model
from models.loading import pick_device
from models.model import Model
from models.spec import LoadOptions

LOAD_FIELDS = frozenset(field.name for field in fields(LoadOptions))


def settled(options: Options, model: Model) -> dict[str, Any]:
    """Returns the options for JSON, with the device and precision that `auto` turned into."""
    return asdict(options) | {"device": model.device.type, "precision": model.precision}


def check_graphs(options: ModelOptions, device: str) -> dict[str, bool]:
    """Returns the fields of Model for CUDA graphs and compiled layers, which not every command offers.
    UserError for graphs on a CPU, or compiled layers without graphs."""
    if not isinstance(options, GraphOptions):
        return {}
    if options.cuda_graphs and device != "cuda":
        raise UserError("--cuda_graphs: this runs on the CPU; leave it out")
    if options.compile and not options.cuda_graphs:
        raise UserError("--compile: it needs the passes of CUDA graphs; add --cuda_graphs, or leave it out")
    return {"graphs": options.cuda_graphs, "compiled": options.compile}


def load_options(options: CheckpointOptions, need_drafter: bool = False) -> LoadOptions:
    """Returns the options of loading; those that a command does not offer keep their defaults."""
    given = {name: value for name, value in asdict(options).items() if name in LOAD_FIELDS}
    if isinstance(options, ModelOptions):
        given["alignment"] = options.drafter_alignment
    if isinstance(options, FilterOptions):
        given["guidance"] = options.cfg
    return LoadOptions(**given, need_drafter=need_drafter)


def load(options: ModelOptions, need_drafter: bool, more_prompts: bool = False) -> Pipeline:
    """Returns the model that the options name, ready to decode. UserError for a bad checkpoint or size.

    more_prompts: prompts will follow after the first images, so the text encoder stays in memory.
    """
    prompts = options if isinstance(options, PromptOptions) else None
    if prompts and prompts.set_seed:
        torch.manual_seed(prompts.random_seed)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    graphs = check_graphs(options, pick_device(options.device))
    loading = replace(load_options(options, need_drafter), keep_text_encoder=more_prompts)
    model = load_model(options.model, loading)
    if prompts and prompts.class_labels and not model.prompts.num_classes:
        raise UserError(f"--class_labels: {options.model_path or model.name} takes texts; give --prompt")
    return Pipeline(replace(model, **graphs))


def load_without_drafter(options: ModelOptions) -> Pipeline:
    """Returns the model for a command that only decodes autoregressively."""
    check_model(options)
    for name in ("drafter_path", "drafter_alignment"):
        if given := shown(options, name):
            raise UserError(f"{given}: this command uses no drafter network; leave it out")
    return load(options, need_drafter=False)
