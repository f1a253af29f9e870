"""train_drafter: the options, named as in the published code where it has them; training/ does the work."""

from __future__ import annotations

from typing import ClassVar

from cli.options import DEVICES, CheckpointOptions
from cli.parser import Options as Base
from cli.parser import declare, option


@declare
class TargetOptions(CheckpointOptions):
    """model"""

    ALIASES: ClassVar[dict[str, str]] = {"base_path": "model_path"}
    config_path: str | None = option("the drafter's (default: one layer of the target's shape)", unit="FILE")
    precision: str = option(
        "of passes, and of the target's weights; the drafter's are trained in fp32 and saved in bf16; auto: "
        "bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", "bf16", "fp32"),
    )
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    threads: int | None = option("torch threads on the CPU (default: torch's own)", unit="N", least=1)


@declare
class DataOptions(Base):
    """data"""

    data_dir: tuple[str, ...] = option(
        "folders that generate_train_data or extract_code filled", ("data/drafter_train_data",), unit="DIR"
    )
    train_data_ratio: float = option(
        "of the images are trained on; the others, at least one, measure", 0.95, unit="SHARE", above=0, most=1
    )
    max_len: int = option("longer images are refused", 4096, unit="TOKENS", least=2)
    cache_gb: float = option(
        "features in memory, not read or computed anew every epoch", 2.0, unit="GB", least=0, most=1e6
    )
    data_noise: str = option(
        "on the features the drafter reads: uniform of width std * 512 / tokens, or gaussian",
        "uniform",
        choices=("uniform", "gaussian", "none"),
    )
    mean: float = option("of gaussian noise", 0.0, unit="X", least=-1e6, most=1e6)
    std: float = option("of the noise", 0.2, unit="X", least=0, most=1e6)


@declare
class LossOptions(Base):
    """loss: SmoothL1 on features + p_w * distance of distributions"""

    p_w: float = option("weight of the distance", 0.1, unit="W", least=0, most=1e6)
    distance: str = option(
        "of the drafter's distribution of codes from the target's; total variation is 1 - the share of draws "
        "that the best acceptance rule takes",
        "cross_entropy",
        choices=("cross_entropy", "total_variation"),
    )
    coupled: bool = option("both guidance branches of every image; else one, 10 % the unconditional", False)
    cfg_loss: bool = option(
        "compare the guided distributions instead of each branch's own; needs --coupled", False
    )
    cfg_scale: float = option("guidance of --cfg_loss", 3.0, unit="SCALE", least=0, most=100)
    ttt_steps: int = option(
        "steps on the drafter's own features, as trees grow (training-time test)", 1, unit="STEPS", least=1
    )
    step_decay: float = option("weight of unrolled step j is D^(j - 1)", 0.8, unit="D", above=0, most=1)


@declare
class OptimiserOptions(Base):
    """optimiser"""

    optimizer: str = option("muon: for matrices, AdamW for the rest", "adamw", choices=("adamw", "muon"))
    lr: float = option("of AdamW", 1e-4, unit="LR", above=0, most=10)
    muon_lr: float = option("of Muon", 5e-3, unit="LR", above=0, most=10)
    weight_decay: float = option("times the rate; muon: on matrices", 0.01, unit="W", least=0, most=10)
    bs: int = option("images per pass and process", 4, unit="IMAGES", least=1)
    gradient_accumulation_steps: int = option("passes that make one step", 1, unit="PASSES", least=1)
    is_warmup: bool = option("warm the learning rate up", True)
    warmup_steps_ratio: float = option("of all steps that warm up", 0.03, unit="SHARE", least=0, most=1)
    flat_ratio: float = option(
        "of all steps before the learning rate falls, linearly to 0", 0.0, unit="SHARE", least=0, most=1
    )
    grad_clip: float = option("bound on gradients; 0: none", 0.5, unit="X", least=0, most=1e6)
    grad_clip_by: str = option("bound every entry, or the norm of all", "value", choices=("value", "norm"))
    ema: float = option("per-step decay of the average saved; 0: none", 0.0, unit="D", least=0, most=1)


@declare
class Options(TargetOptions, DataOptions, LossOptions, OptimiserOptions):
    """run"""

    save_dir: str = option("of state_N, N the epoch, and log.jsonl", "runs/drafter", unit="DIR")
    num_epochs: int = option("passes over the data", 20, unit="N", least=1)
    minutes: float | None = option(
        "train so long, former runs included, instead of --num_epochs", unit="MIN", above=0, most=1e6
    )
    max_steps: int | None = option(
        "stop here, schedules unchanged; 0 saves state_0, the untrained drafter", unit="N", least=0
    )
    eval_freq: int = option("measure so often", 1, unit="EPOCHS", least=1)
    eval_depth: int = option("levels of a tree measured", 5, unit="LEVELS", least=1)
    save_freq: int = option("save so often", 5, unit="EPOCHS", least=1)
    export: str | None = option("folder that gets the last drafter as well", unit="DIR")
    restart: bool = option("discard the states of --save_dir instead of going on", False)
    seed: int = option("of the split, the order and the noise", 0, unit="SEED")


def run(options: Options) -> None:
    """Train, measure and save; the last line printed is one JSON document."""
    from cli.loading import load_options
    from training.train_drafter import run as train

    train(options, load_options(options, need_drafter=options.drafter_path is not None))
