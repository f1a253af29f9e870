"""The settings of a drafter's training, which are the options of train_drafter. They are named as in the
published code, where that has them."""

from __future__ import annotations

from models.family import DEVICES
from storage.command_line import declare, option


@declare("computation and data")
class LearningSettings:
    """What a drafter learns from, in which precision."""

    seed: int = option("seed of the split, the order and the noise", 0, unit="SEED")
    precision: str = option(
        "data type of the computation and of the target's weights; the drafter's weights are trained in fp32 "
        "and saved in bf16; auto: bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", "bf16", "fp32"),
    )
    train_data_ratio: float = option(
        "share of the images to train on; the others validate", 0.95, unit="SHARE", above=0, most=1
    )
    data_noise: str = option(
        "noise on the features that the drafter reads: uniform of width std * 512 / tokens, or gaussian",
        "uniform",
        choices=("uniform", "gaussian", "none"),
        reads={"uniform": ("std",), "gaussian": ("mean", "std")},
    )
    mean: float = option("mean of gaussian noise", 0.0, unit="X")
    std: float = option("width of the noise; gaussian: standard deviation", 0.2, unit="X", least=0)


@declare("loss: SmoothL1 on features + p_w * cross-entropy of codes")
class LossSettings:
    """The loss."""

    p_w: float = option("weight of the cross-entropy", 0.1, unit="W", least=0)
    coupled: bool = option(
        "train on both guidance branches of an image; --no-coupled: on one of them, the unconditional "
        "one for 10 % of the images",
        False,
        reads={True: ("cfg_loss",)},
    )
    cfg_loss: bool = option(
        "compare the guided distributions instead of those of each branch; needs --coupled", False
    )
    cfg_scale: float = option(
        "guidance scale of --cfg_loss and of validation", 3.0, unit="SCALE", least=0, most=100
    )
    ttt_steps: int = option(
        "unrolled steps; the first reads the target's features, each later one the features that the drafter "
        "computed in the step before",
        1,
        unit="STEPS",
        least=1,
    )
    step_decay: float = option("weight of unrolled step j is D^(j - 1)", 0.8, unit="D", above=0, most=1)


@declare("optimiser")
class StepSettings(LossSettings, LearningSettings):
    """What decides the weights after a number of steps. A resumed run must have the same."""

    optimizer: str = option(
        "muon: Muon for matrices, AdamW for the rest",
        "adamw",
        choices=("adamw", "muon"),
        reads={"muon": ("muon_lr",)},
    )
    lr: float = option("learning rate of AdamW", 1e-4, unit="LR", above=0)
    muon_lr: float = option("learning rate of Muon", 5e-3, unit="LR", above=0)
    weight_decay: float = option(
        "a step shrinks weights by W times the learning rate; muon: matrices alone", 0.01, unit="W", least=0
    )
    bs: int = option("images per pass and process", 4, unit="IMAGES", least=1)
    gradient_accumulation_steps: int = option("passes that make one step", 1, unit="PASSES", least=1)
    grad_clip: float = option(
        "limit of gradients; 0: none", 0.5, unit="X", least=0, reads={True: ("grad_clip_by",)}
    )
    grad_clip_by: str = option("limit every entry, or the norm of all", "value", choices=("value", "norm"))
    ema: float = option("decay of the running average; 0: save no average", 0.0, unit="D", least=0, most=1)


@declare("run")
class DrafterSettings(StepSettings):
    """All settings of a run: also its length, its schedule, its files and its device."""

    data_dir: tuple[str, ...] = option(
        "folders that generate_train_data or extract_code filled", ("data/drafter_train_data",), unit="DIR"
    )
    save_dir: str = option("folder of log.jsonl and state_N, N the step", "runs/drafter", unit="DIR")
    export: str | None = option("another folder to write the last drafter to", unit="DIR")
    restart: bool = option("discard the states of --save_dir instead of resuming", False)
    config_path: str | None = option("the drafter's config.json (default: the target's shape)", unit="FILE")
    drafter_path: str | None = option(
        "checkpoint of the drafter that training starts from, a folder or a hub id (default: a new drafter)",
        unit="PATH",
    )
    max_len: int = option(
        "limit of the tokens of an image with its prompt; more are an error", 4096, unit="TOKENS", least=2
    )
    cache_gb: float = option(
        "memory that keeps features from one epoch to the next", 2.0, unit="GB", least=0, most=1e6
    )
    num_epochs: int = option("passes over the data", 20, unit="N", least=1)
    minutes: float | None = option(
        "training time, earlier runs included, instead of --num_epochs",
        unit="MIN",
        above=0,
        reads={False: ("num_epochs",)},
    )
    max_steps: int | None = option(
        "stop at this step, schedules unchanged; 0 saves an untrained drafter", unit="N", least=0
    )
    is_warmup: bool = option(
        "raise the learning rate over the first steps", True, reads={True: ("warmup_steps_ratio",)}
    )
    warmup_steps_ratio: float = option(
        "share of all steps that raise the learning rate", 0.03, unit="SHARE", least=0, most=1
    )
    flat_ratio: float = option(
        "share of all steps after which the rate falls linearly to 0", 0.0, unit="SHARE", least=0, most=1
    )
    eval_freq: int = option("epochs between validations", 1, unit="EPOCHS", least=1)
    eval_depth: int = option("levels of a tree in validation", 5, unit="LEVELS", least=1)
    save_freq: int = option("epochs between saved states", 5, unit="EPOCHS", least=1)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    threads: int | None = option("torch threads on the CPU (default: torch's choice)", unit="N", least=1)
