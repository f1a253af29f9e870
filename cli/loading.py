"""Options -> a loaded pipeline. Device and precision auto are settled here, once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from adt_tree.pipeline import Pipeline
from cli.groups import FilterOptions, GraphOptions, ModelOptions, PromptOptions
from cli.method import check_model, check_no_drafter
from cli.options import Options
from eval.alignment import settle
from eval.errors import UserError
from eval.families import SPLITTABLE
from eval.session import pick_device, pick_precision, worker
from models.model import Extras
from models.registry import SPLIT
from models.registry import load as load_model

GUIDANCE = 3.0  # of the alignment's probe where a command has no --cfg


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and in which precision a model runs, once auto is settled."""

    device: str  # cpu or cuda
    precision: str
    device_map: str | None
    graphs: bool

    def record(self, options: Options) -> dict[str, Any]:
        """The options as JSON may hold them, with what was settled in place of auto."""
        return asdict(options) | {"device": self.device, "precision": self.precision}


def setting_of(options: ModelOptions) -> Setting:
    """Settle device and precision. UserError for a device, a split or graphs that cannot be."""
    device = pick_device(options.device)
    precision = pick_precision(options.precision, device, options.model)
    if options.device_map is not None:
        _check_split(options, device)
    return Setting(device, precision, options.device_map, check_graphs(options, device))


def check_graphs(options: ModelOptions, device: str) -> bool:
    """Whether work is captured; some commands have no such option. UserError where it cannot be."""
    asked = isinstance(options, GraphOptions) and options.cuda_graphs
    if asked and device != "cuda":
        raise UserError("--cuda_graphs: this runs on the CPU; leave it out")
    if asked and options.device_map is not None:
        raise UserError(
            f"--cuda_graphs with --device_map {options.device_map}: a graph is of one device; leave one out"
        )
    return asked


def _check_split(options: ModelOptions, device: str) -> None:
    """UserError for --device_map where there is nothing to split, or no way to."""
    given, count = f"--device_map {options.device_map}", worker().count
    if count > 1:
        raise UserError(f"{given}: {count} processes would share the same GPUs; launch one process")
    visible = torch.cuda.device_count() if device == "cuda" else 0
    if visible < 2:
        raise UserError(f"{given}: it needs two CUDA devices or more, {visible} can be used; leave it out")
    if options.model not in SPLITTABLE:
        raise UserError(f"{given}: --model {options.model} fits one GPU and is not split; leave it out")


def extras_of(options: Any) -> Extras:
    """The options that only some families read; a check of files has no --keep_text_encoder."""
    return Extras(
        target_size=options.target_size,
        tokenizer_base_path=options.tokenizer_base_path,
        vq_path=options.vq_path,
        text_encoder=options.text_encoder,
        revision=options.revision,
        keep_text_encoder=getattr(options, "keep_text_encoder", False),
    )


def load(options: ModelOptions, need_drafter: bool) -> tuple[Pipeline, Setting]:
    """The model the options name, ready to decode. A bad checkpoint or --target_size is a UserError."""
    setting = setting_of(options)
    prompts = options if isinstance(options, PromptOptions) else None
    if prompts and prompts.set_seed:
        torch.manual_seed(prompts.random_seed)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        model = load_model(
            options.model,
            options.model_path,
            options.drafter_path,
            setting.precision,
            SPLIT if setting.device_map else setting.device,
            need_drafter,
            extras_of(options),
        )
        if prompts and prompts.class_labels and not model.num_classes:
            raise UserError(f"--class_labels: {options.model_path or model.name} draws texts; give --prompt")
        guidance = options.cfg if isinstance(options, FilterOptions) else GUIDANCE
        model = settle(model, options.model, options.drafter_alignment, guidance)
        return Pipeline(replace(model, graphs=setting.graphs)), setting
    except ValueError as error:
        raise UserError(str(error)) from error


def load_without_drafter(options: ModelOptions) -> tuple[Pipeline, Setting]:
    """The model for a command that drafts nothing."""
    check_model(options)
    check_no_drafter(options, "no drafter network drafts here")
    return load(options, need_drafter=False)
