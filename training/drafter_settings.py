"""The settings of a drafter's training, named as the options of train_drafter, which explains them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What decides the weights after a number of steps. A resumed run must have the same."""

    seed: int
    precision: str  # "bf16" or "fp32"; "auto": by the device
    train_data_ratio: float
    data_noise: str  # "uniform", "gaussian" or "none"
    mean: float
    std: float
    p_w: float
    coupled: bool
    cfg_loss: bool
    cfg_scale: float
    ttt_steps: int
    step_decay: float
    optimizer: str  # "adamw" or "muon"
    lr: float
    muon_lr: float
    weight_decay: float
    bs: int
    gradient_accumulation_steps: int
    grad_clip: float
    grad_clip_by: str  # "value" or "norm"
    ema: float


@dataclass(frozen=True, kw_only=True)
class DrafterSettings(StepSettings):
    """All settings of a run: also its length, its schedule, its files and its device."""

    data_dir: tuple[str, ...]
    save_dir: str
    export: str | None
    restart: bool
    config_path: str | None
    drafter_path: str | None
    max_len: int
    cache_gb: float
    num_epochs: int
    minutes: float | None
    max_steps: int | None
    is_warmup: bool
    warmup_steps_ratio: float
    flat_ratio: float
    eval_freq: int
    eval_depth: int
    save_freq: int
    device: str
    threads: int | None
