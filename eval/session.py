"""What every command does before it decodes: pick the device, load the model, turn prompts into requests."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from adt_tree.roles import Request
from eval.alignment import settle
from eval.errors import UserError
from eval.families import FP32_ON_CPU, SPLITTABLE, check_family
from eval.method import check_drafter
from eval.prompts import Prompt, image_seed
from models.model import Extras, Model
from models.registry import SPLIT, load

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Worker:
    """This process among those of a launcher (accelerate launch, torchrun)."""

    rank: int = 0
    count: int = 1
    local_rank: int | None = None  # its place on its machine, and the number of its device


def worker() -> Worker:
    """This process as RANK, WORLD_SIZE and LOCAL_RANK describe it; alone without. UserError if damaged."""
    if "WORLD_SIZE" not in os.environ:
        return Worker()
    values = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name, value in values.items():
        if not value.isdecimal():
            raise UserError(f"{name}={value!r}: the launcher's variable is no number; unset it or repair it")
    rank, count, local = (int(value) for value in values.values())
    if rank >= count:
        raise UserError(f"RANK={rank} with WORLD_SIZE={count}: ranks count from 0; unset or repair them")
    return Worker(rank, count, local)


def pick_device(name: str) -> str:
    """auto -> cuda where there is one, that of this process's local rank under a launcher.

    UserError if cuda is asked for and missing, or has fewer devices than the machine has processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu"
    place = worker().local_rank
    if place is not None:
        if place >= torch.cuda.device_count():
            raise UserError(
                f"--device {name}: LOCAL_RANK={place}, but {torch.cuda.device_count()} CUDA devices are "
                "visible; launch a process a device"
            )
        torch.cuda.set_device(place)
    return "cuda"


def pick_precision(name: str, device: str, model: str) -> str:
    """auto -> bf16 where the device multiplies it in hardware, else fp16 on a GPU and fp32, which beats
    emulated bf16, on a CPU. On every CPU fp32 for FP32_ON_CPU: their images can be compared there."""
    if name != "auto":
        return name
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    multiplied = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bf16" if multiplied and model not in FP32_ON_CPU else "fp32"


def check_split(args: argparse.Namespace) -> None:
    """UserError for --device_map where there is nothing to split, or no way to."""
    if args.device_map is None:
        return
    given = f"--device_map {args.device_map}"
    if worker().count > 1:
        raise UserError(f"{given}: {worker().count} processes would share the same GPUs; launch one process")
    visible = torch.cuda.device_count() if args.device == "cuda" else 0
    if visible < 2:
        raise UserError(f"{given}: it needs two CUDA devices or more, {visible} can be used; leave it out")
    if args.model not in SPLITTABLE:
        raise UserError(f"{given}: --model {args.model} fits one GPU and is not split; leave it out")


def check_graphs(args: argparse.Namespace) -> bool:
    """Whether work is captured. UserError where it cannot be; some commands have no such option."""
    asked = getattr(args, "cuda_graphs", False)
    if asked and args.device != "cuda":
        raise UserError("--cuda_graphs: this runs on the CPU; leave it out")
    if asked and args.device_map is not None:
        raise UserError(
            f"--cuda_graphs with --device_map {args.device_map}: a graph is of one device; leave one out"
        )
    return asked


def extras_of(args: argparse.Namespace) -> Extras:
    """The options that only some families read; a check of files has no --keep_text_encoder."""
    return Extras(
        target_size=args.target_size,
        tokenizer_base_path=args.tokenizer_base_path,
        vq_path=args.vq_path,
        text_encoder=args.text_encoder,
        revision=args.revision,
        keep_text_encoder=getattr(args, "keep_text_encoder", False),
    )


def load_model(args: argparse.Namespace, need_drafter: bool) -> Model:
    """The model the options name; a bad checkpoint or --target_size is a UserError.

    What the options leave to the machine (device and precision auto) is settled in args, for the record.
    """
    args.device = pick_device(args.device)
    args.precision = pick_precision(args.precision, args.device, args.model)
    check_split(args)
    graphs = check_graphs(args)
    if args.set_seed:
        torch.manual_seed(args.random_seed)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        model = load(
            args.model,
            args.model_path,
            args.drafter_path,
            args.precision,
            SPLIT if args.device_map else args.device,
            need_drafter,
            extras_of(args),
        )
        if args.class_labels and not model.num_classes:
            raise UserError(f"--class_labels: {args.model_path or model.name} draws texts; give --prompt")
        settled = settle(model, args.model, args.drafter_alignment, args.cfg)
        return replace(settled, graphs=graphs)
    except ValueError as error:
        raise UserError(str(error)) from error


def make_requests(model: Model, prompts: Sequence[Prompt], run_seed: int) -> tuple[list[Request], int]:
    """Requests with their seeds, and the longest prompt in cache slots. UserError for a text the model cannot
    draw."""
    try:
        openings = model.encode_all([prompt.text for prompt in prompts])
    except ValueError as error:
        raise UserError(str(error)) from error
    requests = [
        Request(prompt.name, opening, image_seed(run_seed, prompt.name))
        for prompt, opening in zip(prompts, openings, strict=True)
    ]
    return requests, max((model.prompt_length(request.prompt) for request in requests), default=1)


def synchronise(device: torch.device) -> None:
    """Wait for the accelerator, so that a clock read next is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def circumstances(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """What a figure needs to be repeated: commit, device, precision, versions, date."""
    return {
        **environment(args.device),
        "precision": args.precision,
        "weights": model.weights_sha,
        "drafter": model.drafter_sha,
        "grid": [model.grid.height, model.grid.width],
    }


def environment(device: str) -> dict[str, Any]:
    """The code and the machine a figure was made by, and when. device: cpu or cuda."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {_cpu_name()}"
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "changes": _changes(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _changes() -> str | None:
    """A hash of the uncommitted changes to the code that runs; None where there are none."""
    changes = _git("diff", "HEAD", "--", "adt_tree", "models", "eval")
    return hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else None


def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name", "unknown"))


def _git(*words: str) -> str:
    try:
        answer = subprocess.run(
            ("git", *words), cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def load_undrawn(args: argparse.Namespace) -> Model:
    """The model, without a drafter, for a command that draws nothing: it has no options of drawing."""
    args = argparse.Namespace(
        **{**vars(args), "cfg_mode": None, "prompt": None, "random_seed": 0, "set_seed": False}
    )
    check_family(args)
    check_drafter(args, ())
    return load_model(args, need_drafter=False)
