"""train_emoji: builds the embedded model in stages. Each stage is a module of training/emoji."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from importlib import import_module

from cli.options import DEVICES
from cli.parser import Options as Base
from cli.parser import declare, option
from models.spec import PRECISIONS
from training.emoji.data import STYLES


@declare
class StageOptions(Base):
    """stage"""

    work_dir: str = option("folder of the data and of everything the stages write", "data/emoji", unit="DIR")


@declare
class DataOptions(StageOptions):
    """fetch and rasterise the emoji sets, write captions"""

    styles: tuple[str, ...] = option("emoji sets", tuple(STYLES), choices=tuple(STYLES))
    max_names: int = option("emoji names to use, spread over the subgroups; 0: all", 140, unit="N", least=0)
    image_size: int = option("side of a picture, a multiple of 4", 64, unit="PIXELS", least=16, most=256)
    num_held_out: int = option("number of (style, name) pairs left out of training", 24, unit="N", least=0)
    seed: int = option("seed of the choice of held-out pairs", 0, unit="SEED")


@declare
class BpeOptions(StageOptions):
    """train the text vocabulary"""

    num_embeddings: int = option("number of image codes", 1024, unit="CODES", least=1)
    vocab_size: int = option("size of the vocabulary, image codes included", 2816, unit="TOKENS", least=1)


@declare
class TrainedOptions(StageOptions):
    """training"""

    restart: bool = option("discard the results of an earlier run of this stage", False)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    threads: int = option("torch threads on the CPU", 2, unit="N", least=1)
    seed: int = option("seed of the initial weights", 0, unit="SEED")
    checkpoint_minutes: float = option("time between saved states", 3, unit="MIN", least=0)


@declare
class TokenizerOptions(TrainedOptions):
    """train the VQ tokenizer"""

    checkpoint_minutes: float = 2
    minutes: float = option("training time, earlier runs included", 26, unit="MIN", above=0)
    max_steps: int = option("stop at this step even if time is left; -1: never", -1, unit="N", least=-1)
    start: str | None = option("exported checkpoint whose VQGAN to train further", unit="DIR")
    batch_size: int = option("pictures per step", 8, unit="N", least=1)
    learning_rate: float = option("highest learning rate", 2e-3, unit="LR", above=0)
    perceptual: float = option("weight of the perceptual loss", 1.0, unit="W", least=0)
    flat: float = option(
        "weight of the loss that gives cells of the same flat colour the same vector", 0.5, unit="W", least=0
    )
    base_channels: int = option("channels of the first level", 32, unit="N", least=1)
    channel_multiplier: tuple[int, ...] = option("width of each level", (1, 1, 2), unit="N", least=1)
    num_embeddings: int = option("number of codes", 1024, unit="CODES", least=1)
    embed_dim: int = option("width of a latent vector", 32, unit="N", least=1)
    warmup_steps: int = option("steps before the codebook is used", 1200, unit="N", least=0)
    rate_steps: int = option("steps over which --rate rises from 0", 600, unit="N", least=1)
    rate: float = option(
        "penalty of rare codes: a code's squared distance grows by X * -log(share of the code)",
        8.0,
        unit="X",
        least=0,
    )


@declare
class TargetOptions(TrainedOptions):
    """train the target"""

    max_pictures: int = option("pictures to train on, earlier runs included", 300_000, unit="N", least=1)
    decay_pictures: int = option(
        "further pictures, on which a copy, target_decayed.pt, is trained while its learning rates fall to 0",
        0,
        unit="N",
        least=0,
    )
    precision: str = option("bf16: autocast, and Muon's iterations in bf16", "fp32", choices=("fp32", "bf16"))
    compile: bool = option("use torch.compile, which takes a minute at the start", False)
    validate_minutes: float = option("time between validations", 10, unit="MIN", least=0)
    batch_size: int = option("pictures per step", 16, unit="N", least=1)
    muon_lr: float = option("learning rate of hidden matrices", 6e-3, unit="LR", above=0)
    adam_lr: float = option("learning rate of embedding, head and norms", 3e-3, unit="LR", above=0)
    weight_decay: float = option("a step shrinks hidden matrices by W * muon_lr", 0.02, unit="W", least=0)
    dropped: float = option(
        "share of prompts that training replaces by an empty one", 0.1, unit="SHARE", least=0, most=1
    )
    hidden_size: int = option("width of the decoder", 256, unit="N", least=1)
    num_layers: int = option("layers of the decoder", 10, unit="N", least=1)
    num_heads: int = option("attention heads of a layer", 4, unit="N", least=1)
    intermediate_size: int = option("width of a layer's MLP", 704, unit="N", least=1)
    max_positions: int = option("longest sequence, in tokens", 512, unit="N", least=1)


@declare
class RestoreOptions(StageOptions):
    """put an exported checkpoint back into a work folder, to train it further"""

    start: str = option("folder that `train_emoji export` wrote", "ckpts/emoji", unit="DIR")


@declare
class MeasureOptions(TargetOptions):
    """measure the tokenizer and the target on pictures they were not trained on"""

    of: tuple[str, ...] = option("parts to measure", ("tokenizer", "target"), choices=("tokenizer", "target"))
    num_pictures: int = option("pictures of each stream, such as held-out pairs", 384, unit="N", least=1)


@declare
class PromptsOptions(StageOptions):
    """write the prompt files of tables, constants, contact sheet and drafter's data"""

    out_dir: str = option("folder of the prompt files", "configs", unit="DIR")
    num_prompts: int = option("prompts in WORK_DIR/drafter_prompts.txt", 5000, unit="N", least=1)
    num_kept: int = option("how many of these to write to OUT_DIR as well", 800, unit="N", least=0)


@declare
class ExportOptions(StageOptions):
    """write the checkpoint and its model card"""

    out: str = option("folder of the checkpoint", "ckpts/emoji", unit="DIR")
    device_name: str = option("name of the machine in the model card", "2 CPU cores", unit="TEXT")
    history: str = option(
        "sentence of the model card on how this training was done",
        "Every stage ran in one go with its defaults.",
        unit="TEXT",
    )
    commit: str = option("commit of the training code, for the model card", "not given")
    date: str = option("date of the training, for the model card", date.today().isoformat())


@declare
class RecogniseOptions(StageOptions):
    """measure how often a picture's nearest original has the right name"""

    model_path: str = option("exported checkpoint", "ckpts/emoji", unit="DIR")
    cfg: float = option("guidance scale; 1: none", 3.0, unit="SCALE", least=0, most=100)
    temperature: float = option("0: greedy", 1.0, unit="T", least=0, most=100)
    precision: str = option("data type of weights and activations", "fp32", choices=PRECISIONS)
    threads: int = option("torch threads", 2, unit="N", least=1)
    seed: int = option("seed of the first picture; each next picture takes the next seed", 0, unit="SEED")
    num_pictures: int = option("pictures of trained pairs", 200, unit="N", least=1)
    num_held_out: int = option("pictures of held-out pairs", 96, unit="N", least=1)


STAGES: dict[str, type[StageOptions]] = {
    "data": DataOptions, "tokenizer": TokenizerOptions, "bpe": BpeOptions, "target": TargetOptions,
    "restore": RestoreOptions, "measure": MeasureOptions, "prompts": PromptsOptions,
    "export": ExportOptions, "recognise": RecogniseOptions,
}  # fmt: skip


def run(stage: str, argv: Sequence[str]) -> None:
    """Parses and runs one stage."""
    options = STAGES[stage].parse(argv, f"main.py train_emoji {stage}")
    import_module(f"training.emoji.{stage}").run(options)
