"""Options of train_drafter, named as in the published code where it has them. No torch."""

from __future__ import annotations

import argparse

from eval.checkpoint_options import add_checkpoint_arguments
from eval.parser import at_least, within

SAVE_DIR = "runs/drafter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of train_drafter."""
    group = add_checkpoint_arguments(parser)
    group.add_argument(
        "--base_path", dest="model_path", metavar="PATH", default=argparse.SUPPRESS, help="--model_path"
    )
    group.add_argument(
        "--config_path",
        metavar="FILE",
        help="config.json of the drafter (default: one layer of the target's shape)",
    )
    group.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of the target, and of the drafter's passes; its weights are fp32 while they are trained and "
        "bf16 in its checkpoints; auto: bf16 on CUDA, else fp32",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    group.add_argument("--threads", type=at_least(1), help="torch threads on the CPU (default: torch's own)")
    _add_data(parser)
    _add_objective(parser)
    _add_optimiser(parser)
    _add_run(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data_dir",
        nargs="+",
        default=["data/drafter_train_data"],
        metavar="DIR",
        help="folders that generate_train_data or extract_code filled",
    )
    group.add_argument(
        "--train_data_ratio",
        type=within(0, 1, open_low=True),
        default=0.95,
        metavar="SHARE",
        help="of the images that are trained on; the others, at least one, measure",
    )
    group.add_argument(
        "--max_len", type=at_least(2), default=4096, metavar="TOKENS", help="longer images are refused"
    )
    group.add_argument(
        "--cache_gb",
        type=within(0, 1e6),
        default=2.0,
        metavar="GB",
        help="features kept in memory rather than read or computed again every epoch",
    )
    group.add_argument(
        "--data_noise",
        choices=("uniform", "gaussian", "none"),
        default="uniform",
        help="on the features the drafter reads: uniform of width std * 512 / tokens, or gaussian",
    )
    group.add_argument("--mean", type=within(-1e6, 1e6), default=0.0, help="of gaussian noise")
    group.add_argument("--std", type=within(0, 1e6), default=0.2, help="of the noise")


def _add_objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss: SmoothL1 on features + p_w * distance of distributions")
    group.add_argument("--p_w", type=within(0, 1e6), default=0.1, metavar="W", help="weight of the distance")
    group.add_argument(
        "--distance",
        choices=("cross_entropy", "total_variation"),
        default="cross_entropy",
        help="of the drafter's distribution of codes from the target's; total variation is 1 - the share of "
        "draws that the best acceptance rule takes",
    )
    group.add_argument(
        "--coupled",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="both guidance branches of every image; else one, in a tenth of cases the unconditional",
    )
    group.add_argument(
        "--cfg_loss",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compare the guided distributions, as decoding does, instead of each branch's own; needs "
        "--coupled",
    )
    group.add_argument(
        "--cfg_scale", type=within(0, 100), default=3.0, metavar="SCALE", help="guidance of --cfg_loss"
    )
    group.add_argument(
        "--ttt_steps",
        type=at_least(1),
        default=1,
        metavar="STEPS",
        help="steps unrolled on the drafter's own features, as trees are grown (training-time test); 1: none",
    )
    group.add_argument(
        "--step_decay",
        type=within(0, 1, open_low=True),
        default=0.8,
        metavar="D",
        help="weight of unrolled step j is D^(j - 1)",
    )
    group.add_argument(
        "--embed_upscale", type=float, default=1.0, help="without effect in the published code: 1 or refused"
    )


def _add_optimiser(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimiser")
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the layer's matrices, AdamW for the rest",
    )
    group.add_argument("--lr", type=within(0, 10, open_low=True), default=1e-4, help="of AdamW")
    group.add_argument("--muon_lr", type=within(0, 10, open_low=True), default=5e-3, help="of Muon")
    group.add_argument(
        "--weight_decay", type=within(0, 10), default=0.01, help="times the learning rate; muon: on matrices"
    )
    group.add_argument(
        "--bs", type=at_least(1), default=4, metavar="IMAGES", help="images a pass and process"
    )
    group.add_argument(
        "--gradient_accumulation_steps",
        type=at_least(1),
        default=1,
        metavar="PASSES",
        help="passes whose mean gradient makes one step",
    )
    group.add_argument(
        "--is_warmup", action=argparse.BooleanOptionalAction, default=True, help="warm the learning rate up"
    )
    group.add_argument(
        "--warmup_steps_ratio",
        type=within(0, 1),
        default=0.03,
        metavar="SHARE",
        help="of all steps that warm up",
    )
    group.add_argument(
        "--flat_ratio",
        type=within(0, 1),
        default=0.0,
        metavar="SHARE",
        help="of all steps before the learning rate falls, linearly to 0",
    )
    group.add_argument("--grad_clip", type=within(0, 1e6), default=0.5, help="bound on gradients; 0: none")
    group.add_argument(
        "--grad_clip_by",
        choices=("value", "norm"),
        default="value",
        help="what is bounded: every entry, or the norm of all",
    )
    group.add_argument(
        "--ema",
        type=within(0, 1),
        default=0.0,
        metavar="D",
        help="decay a step of the average saved; 0: none",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--save_dir", default=SAVE_DIR, metavar="DIR", help="of state_N, N the epoch, and log.jsonl"
    )
    group.add_argument("--num_epochs", type=at_least(1), default=20, metavar="N", help="passes over the data")
    group.add_argument(
        "--minutes",
        type=within(0, 1e6, open_low=True),
        metavar="MIN",
        help="train so long instead of --num_epochs, former runs included (default: none)",
    )
    group.add_argument(
        "--max_steps",
        type=at_least(0),
        metavar="N",
        help="stop here, schedules unchanged; 0 saves state_0, the untrained drafter (default: none)",
    )
    group.add_argument("--eval_freq", type=at_least(1), default=1, metavar="EPOCHS", help="measure so often")
    group.add_argument(
        "--eval_depth", type=at_least(1), default=5, metavar="LEVELS", help="levels of a tree measured"
    )
    group.add_argument("--save_freq", type=at_least(1), default=5, metavar="EPOCHS", help="save so often")
    group.add_argument(
        "--export", metavar="DIR", help="folder that gets the last drafter as well (default: none)"
    )
    group.add_argument(
        "--restart", action="store_true", help="discard the states of --save_dir instead of going on"
    )
    group.add_argument("--seed", type=int, default=0, help="of the split, the order and the noise")
    group.add_argument(
        "--wandb",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refused: nothing is uploaded; log.jsonl holds everything",
    )
    group.add_argument(
        "--config", metavar="FILE", help="flat YAML file of options; the command line wins (default: none)"
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
