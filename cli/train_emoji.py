"""train_emoji: the embedded model, stage by stage: the options of each; training/emoji/ does the work."""

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

    work_dir: str = option("folder of the data and of everything built", "data/emoji", unit="DIR")


@declare
class DataOptions(StageOptions):
    """fetch and rasterise the emoji sets, write captions"""

    styles: tuple[str, ...] = option("emoji sets", tuple(STYLES), choices=tuple(STYLES))
    max_names: int = option("names kept, spread over the subgroups; 0: all", 140, unit="N", least=0)
    image_size: int = option("side of a picture, a multiple of 4", 64, unit="PIXELS", least=16, most=256)
    num_held_out: int = option("(style, name) pairs kept out of training", 24, unit="N", least=0)
    seed: int = option("of what is held out", 0, unit="SEED")


@declare
class BpeOptions(StageOptions):
    """train the text vocabulary"""

    num_embeddings: int = option("image codes", 1024, unit="CODES", least=1)
    vocab_size: int = option("all tokens together", 2816, unit="TOKENS", least=1)


@declare
class TrainedOptions(StageOptions):
    """training"""

    restart: bool = option("discard what an earlier run of this stage made and begin anew", False)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    threads: int = option("torch threads on the CPU", 2, unit="N", least=1)
    seed: int = option("of the first weights", 0, unit="SEED")
    checkpoint_minutes: float = option("save so often", 3, unit="MIN", least=0)


@declare
class TokenizerOptions(TrainedOptions):
    """train the VQ tokenizer"""

    checkpoint_minutes: float = 2
    minutes: float = option("wall-clock budget, resumed time included", 26, unit="MIN", above=0)
    max_steps: int = option("stop at this step although time is left; -1: none", -1, unit="N", least=-1)
    start: str | None = option("exported checkpoint whose VQGAN is trained further", unit="DIR")
    batch_size: int = option("pictures a step", 8, unit="N", least=1)
    learning_rate: float = option("the highest", 2e-3, unit="LR", above=0)
    perceptual: float = option("weight of the feature loss", 1.0, unit="W", least=0)
    flat: float = option("weight of equal vectors for equal flat cells", 0.5, unit="W", least=0)
    base_channels: int = option("of the first level", 32, unit="N", least=1)
    channel_multiplier: tuple[int, ...] = option("channels of each level", (1, 1, 2), unit="N", least=1)
    num_embeddings: int = option("codes", 1024, unit="CODES", least=1)
    embed_dim: int = option("numbers a latent vector", 32, unit="N", least=1)
    warmup_steps: int = option("steps without the codebook", 1200, unit="N", least=0)
    rate_steps: int = option("steps over which the rate is raised", 600, unit="N", least=1)
    rate: float = option("squared distance that one nat of a code's rarity costs", 8.0, unit="X", least=0)


@declare
class TargetOptions(TrainedOptions):
    """train the target"""

    max_pictures: int = option("stop after so many, all resumes together", 300_000, unit="N", least=1)
    decay_pictures: int = option(
        "over which learning rates fall to 0, target.pt into target_decayed.pt; 0: no", 0, unit="N", least=0
    )
    precision: str = option("bf16: autocast, and Muon's rounds", "fp32", choices=("fp32", "bf16"))
    compile: bool = option("the loss by torch.compile; one minute first", False)
    validate_minutes: float = option("measure so often", 10, unit="MIN", least=0)
    batch_size: int = option("pictures a step", 16, unit="N", least=1)
    muon_lr: float = option("for hidden matrices", 6e-3, unit="LR", above=0)
    adam_lr: float = option("for embedding, head and norms", 3e-3, unit="LR", above=0)
    weight_decay: float = option("times the learning rate, hidden matrices", 0.02, unit="W", least=0)
    dropped: float = option("share of empty prompts", 0.1, unit="SHARE", least=0, most=1)
    hidden_size: int = option("of the decoder", 256, unit="N", least=1)
    num_layers: int = option("of the decoder", 10, unit="N", least=1)
    num_heads: int = option("of a layer", 4, unit="N", least=1)
    intermediate_size: int = option("of a layer's MLP", 704, unit="N", least=1)
    max_positions: int = option("tokens of a sequence", 512, unit="N", least=1)


@declare
class RestoreOptions(StageOptions):
    """put an exported checkpoint back, to train it further"""

    start: str = option("checkpoint that `train_emoji export` wrote", "ckpts/emoji", unit="DIR")


@declare
class MeasureOptions(TargetOptions):
    """figures of the tokenizer and the target on pictures never trained on"""

    of: tuple[str, ...] = option("what is measured", ("tokenizer", "target"), choices=("tokenizer", "target"))
    num_pictures: int = option("of each kind", 384, unit="N", least=1)


@declare
class PromptsOptions(StageOptions):
    """write the prompts of the tables, the constants, the contact sheet and the drafter's data"""

    out_dir: str = option("folder of the prompt files", "configs", unit="DIR")
    num_prompts: int = option("in WORK_DIR/drafter_prompts.txt, for its data", 5000, unit="N", least=1)
    num_kept: int = option("of these, in OUT_DIR as well", 800, unit="N", least=0)


@declare
class ExportOptions(StageOptions):
    """write the checkpoint and its model card"""

    out: str = option("folder of the checkpoint", "ckpts/emoji", unit="DIR")
    device_name: str = option("words of the model card for the machine", "2 CPU cores", unit="TEXT")
    history: str = option(
        "words of the model card on how this training differed",
        "Every stage ran in one go with its defaults.",
        unit="TEXT",
    )
    commit: str = option("of the code that trained, for the model card", "not given")
    date: str = option("of the training run, for the model card", date.today().isoformat())


@declare
class RecogniseOptions(StageOptions):
    """how often a picture's nearest original has the right name"""

    model_path: str = option("exported checkpoint", "ckpts/emoji", unit="DIR")
    cfg: float = option("guidance scale; 1: none", 3.0, unit="SCALE", least=0, most=100)
    temperature: float = option("0: greedy", 1.0, unit="T", least=0, most=100)
    precision: str = option("of weights and activations", "fp32", choices=PRECISIONS)
    threads: int = option("torch threads", 2, unit="N", least=1)
    seed: int = option("of the first picture; each takes the next one", 0, unit="SEED")
    num_pictures: int = option("of trained pairs", 200, unit="N", least=1)
    num_held_out: int = option("of pairs kept out of training", 96, unit="N", least=1)


STAGES: dict[str, type[StageOptions]] = {
    "data": DataOptions, "tokenizer": TokenizerOptions, "bpe": BpeOptions, "target": TargetOptions,
    "restore": RestoreOptions, "measure": MeasureOptions, "prompts": PromptsOptions,
    "export": ExportOptions, "recognise": RecogniseOptions,
}  # fmt: skip


def run(stage: str, argv: Sequence[str]) -> None:
    """Parse and run one stage."""
    options = STAGES[stage].parse(argv, f"main.py train_emoji {stage}")
    import_module(f"training.emoji.{stage}").run(options)
