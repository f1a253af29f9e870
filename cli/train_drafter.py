"""train_drafter: trains a drafter."""

from __future__ import annotations

from cli.options import CheckpointOptions, check_guided
from models.checkpoint.files import json_text
from storage.command_line import CommandOptions, declare
from training.drafter_settings import DrafterSettings


@declare("run", {"base_path": "model_path"})
class Options(CheckpointOptions, DrafterSettings, CommandOptions):
    """The target, and how its drafter is trained."""


def run(options: Options) -> None:
    """Trains, validates and saves the drafter. The last line printed is one JSON document."""
    check_guided(options, "train_drafter")
    from cli.model_from_options import load_options
    from training.drafter_trainer import run as train

    loading = load_options(options, need_drafter=options.drafter_path is not None)
    result = train(options, options.model, loading)
    if result is not None:
        print(json_text(result))
