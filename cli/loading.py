"""Options -> a loaded pipeline."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import torch

from adt_tree.errors import UserError
from adt_tree.pipeline import Pipeline
from cli.method import check_model
from cli.options import CheckpointOptions, FilterOptions, GraphOptions, ModelOptions, PromptOptions
from cli.parser import Options, shown
from models.loading import load as load_model
from models.loading import pick_device
from models.model import Model
from models.spec import LoadOptions

LOAD_FIELDS = frozenset(field.name for field in fields(LoadOptions))


def settled(options: Options, model: Model) -> dict[str, Any]:
    """The options as JSON may hold them, with what the model runs on and in in place of auto."""
    return asdict(options) | {"device": model.device.type, "precision": model.precision}


def check_graphs(options: ModelOptions, device: str) -> bool:
    """Whether work is captured; some commands have no such option. UserError where it cannot be."""
    asked = isinstance(options, GraphOptions) and options.cuda_graphs
    if asked and device != "cuda":
        raise UserError("--cuda_graphs: this runs on the CPU; leave it out")
    return asked


def load_options(options: CheckpointOptions, need_drafter: bool = False) -> LoadOptions:
    """What the options say of loading; a check of files has not all of them."""
    given = {name: value for name, value in asdict(options).items() if name in LOAD_FIELDS}
    if isinstance(options, ModelOptions):
        given["token_shift"] = options.drafter_alignment
    if isinstance(options, FilterOptions):
        given["guidance"] = options.cfg
    return LoadOptions(**given, need_drafter=need_drafter)


def load(options: ModelOptions, need_drafter: bool, more_prompts: bool = False) -> Pipeline:
    """The model the options name, ready to decode. A bad checkpoint or --target_size is a UserError.

    more_prompts: some follow once the first are drawn, so that a text encoder stays in memory.
    """
    prompts = options if isinstance(options, PromptOptions) else None
    if prompts and prompts.set_seed:
        torch.manual_seed(prompts.random_seed)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    graphs = check_graphs(options, pick_device(options.device))
    own = replace(load_options(options, need_drafter), keep_text_encoder=more_prompts)
    model = load_model(options.model, own)
    if prompts and prompts.class_labels and not model.prompts.num_classes:
        raise UserError(f"--class_labels: {options.model_path or model.name} draws texts; give --prompt")
    return Pipeline(replace(model, graphs=graphs))


def load_without_drafter(options: ModelOptions) -> Pipeline:
    """The model for a command that drafts nothing."""
    check_model(options)
    for name in ("drafter_path", "drafter_alignment"):
        if given := shown(options, name):
            raise UserError(f"{given}: no drafter network drafts here; leave it out")
    return load(options, need_drafter=False)
