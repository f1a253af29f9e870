"""Trains an EAGLE drafter for a target on stored images, in one process or several (train_drafter).

Everything random is a function of the seed, the epoch and the step. So a resumed run continues exactly as an
uninterrupted one, if its length is given in epochs.
"""

from __future__ import annotations

import copy
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from adt_tree.errors import UserError, as_seed
from models.checkpoint.files import append_json
from models.family import LoadOptions
from models.loading import load, pick_device
from models.model import Model
from training import drafter_states
from training.drafter_data import Images, epoch_order, noised, split
from training.drafter_loss import Objective, Outcome, Unrolled, expected_tau, measure
from training.muon import muon_and_adamw
from training.new_drafter import default_fields, new_drafter, read_fields_of, write_drafter
from training.shards import Shards, read_shards

# Options that a resumed run must share with the one that saved its state.
FIXED_OPTIONS = (
    "bs", "gradient_accumulation_steps", "optimizer", "lr", "muon_lr", "weight_decay", "p_w",
    "coupled", "cfg_loss", "cfg_scale", "ttt_steps", "step_decay", "data_noise", "mean", "std", "ema", "seed",
    "train_data_ratio", "precision", "grad_clip", "grad_clip_by",
)  # fmt: skip


class Trainer:
    """One process of a run: the network and its running average, the optimisers, the images, the progress.

    A step of the optimisers uses the gradients of gradient_accumulation_steps passes. In a pass every process
    reads --bs images.
    """

    def __init__(self, args: Any, model: Model, shards: Shards, accelerator: Any) -> None:
        torch.manual_seed(as_seed(args.seed))
        self.args, self.model, self.accelerator = args, model, accelerator
        self.images = Images(model, shards, int(args.cache_gb * 1e9), args.max_len)
        self.train, self.held_out = split(shards.names, args.train_data_ratio, args.seed)
        self.pass_images = args.bs * accelerator.num_processes
        self.step_images = self.pass_images * args.gradient_accumulation_steps
        if len(self.train) < self.step_images:
            raise UserError(
                f"{len(shards)} images, {len(self.train)} of them for training: a step takes "
                f"{self.step_images}; make more, or choose a smaller --bs"
            )
        self.steps_per_epoch = len(self.train) // self.step_images
        self.step, self._start = 0, time.monotonic()
        # The first features pack the decoder, which puts other layers into it; gradients flow through these.
        head = model.decoder.head
        self.head = nn.Sequential(*head) if isinstance(head, nn.Sequential) else head
        guidance = args.cfg_scale if args.cfg_loss else None
        self.objective = Objective(args.ttt_steps, args.p_w, args.step_decay, guidance)
        self.validation_objective = Objective(args.eval_depth, args.p_w, args.step_decay, args.cfg_scale)
        self.fields = (
            read_fields_of(Path(args.config_path), model) if args.config_path else default_fields(model)
        )
        self.net = new_drafter(self.fields, model)
        if model.drafter_net is not None:
            start_from(self.net, model.drafter_net, args.drafter_path)
        self.net.requires_grad_(True).embed.requires_grad_(False)
        self.optimisers = self._optimisers()
        self.averaged = copy.deepcopy(self.net).requires_grad_(False)
        self.module = accelerator.prepare(Unrolled(self.net))

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        args, trained = self.args, [p for p in self.net.parameters() if p.requires_grad]
        if args.optimizer == "adamw":
            adamw = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
            optimisers: list[torch.optim.Optimizer] = [adamw]
        else:
            optimisers = muon_and_adamw(self.net, args.muon_lr, args.lr, args.weight_decay)
        for group in (group for optimiser in optimisers for group in optimiser.param_groups):
            group["initial_lr"] = group["lr"]
        return optimisers

    @property
    def spent_s(self) -> float:
        """Seconds of training, earlier runs included."""
        return time.monotonic() - self._start

    def fraction(self) -> float:
        """Returns the share of the run that is over, in [0, 1].

        If the length is given in minutes, earlier runs count, and all processes use the clock of the main
        one: they must agree on when to stop.
        """
        from accelerate.utils import broadcast

        if self.args.minutes is None:
            return min(self.step / (self.args.num_epochs * self.steps_per_epoch), 1.0)
        share = min(self.spent_s / (60 * self.args.minutes), 1.0)
        return float(broadcast(torch.tensor(share, dtype=torch.float64, device=self.accelerator.device)))

    def factor(self, fraction: float) -> float:
        """Returns the factor of the learning rates at a fraction of the run.

        It rises over the warm-up, stays at 1 until --flat_ratio, then falls linearly to 0. Warm-up and
        --flat_ratio are shares of the whole run, not of its first epoch.
        """
        warm = self.args.warmup_steps_ratio if self.args.is_warmup else 0.0
        one_step = 1 / (self.args.num_epochs * self.steps_per_epoch)  # lets the first factor exceed 0
        flat = min(max(self.args.flat_ratio, warm), 1 - 1e-9)
        rise = min((fraction + one_step) / warm, 1.0) if warm else 1.0
        return rise * min((1 - fraction) / (1 - flat), 1.0)

    def payload(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the state that a resumed run needs."""
        return {
            "net": self.net.state_dict(), "average": self.averaged.state_dict(), "step": self.step,
            "spent_s": self.spent_s, "optimisers": [o.state_dict() for o in self.optimisers],
            "settings": settings,
        }  # fmt: skip

    def resume(self, payload: dict[str, Any]) -> None:
        """Continues from a payload."""
        self.net.load_state_dict(payload["net"])
        self.averaged.load_state_dict(payload["average"])
        for optimiser, state in zip(self.optimisers, payload["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self._start = payload["step"], time.monotonic() - payload["spent_s"]

    def pass_outcome(self, number: int) -> Outcome:
        """Adds the gradients of pass `number` of the step, on the images of this process, and returns its
        outcome."""
        epoch, place = divmod(self.step, self.steps_per_epoch)
        order = epoch_order(self.train, self.args.seed, epoch)
        start = place * self.step_images + number * self.pass_images
        rank = self.accelerator.process_index
        images = order[start + rank : start + self.pass_images : self.accelerator.num_processes]
        stream = ((self.args.seed * 1_000_003 + self.step) * 1009 + number) * 1009 + rank
        batch = self.images.batch(images, None if self.args.coupled else random.Random(stream))
        generator = torch.Generator().manual_seed(as_seed(stream))
        inputs = noised(batch, self.args.data_noise, self.args.mean, self.args.std, generator)
        with self.accelerator.accumulate(self.module), self.accelerator.autocast():
            outputs = self.module(batch.tokens, inputs, self.args.ttt_steps)
            outcome = measure(outputs, batch, self.head, self.objective)
            self.accelerator.backward(outcome.loss)
        return outcome

    def train_step(self, factor: float) -> Outcome:
        """Updates the weights at `factor` times the learning rates; returns the outcome of the last pass."""
        args = self.args
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["initial_lr"] * factor
        for number in range(args.gradient_accumulation_steps):
            outcome = self.pass_outcome(number)
        if args.grad_clip:
            clip = nn.utils.clip_grad_value_ if args.grad_clip_by == "value" else nn.utils.clip_grad_norm_
            clip(self.net.parameters(), args.grad_clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        blend(self.averaged, self.net, min(args.ema, self.step / (self.step + 10)))
        return outcome

    @torch.no_grad()
    def validation(self) -> dict[str, Any]:
        """Returns loss and agreement by level on the held-out images, for the averaged weights.

        All processes must call this. Each measures its share of the batches, because processes that wait
        while one works would run into the time-out of their group.
        """
        self.averaged.eval()
        unrolled, size, accelerator = Unrolled(self.averaged), self.args.bs, self.accelerator
        starts = range(0, len(self.held_out), size)[accelerator.process_index :: accelerator.num_processes]
        rows = [[0.0] * (3 + self.args.eval_depth)]  # of each batch: 1, regression, entropy, agreement
        for start in tqdm(starts, "validation", unit="batch", leave=False):
            batch = self.images.batch(self.held_out[start : start + size], None)
            with accelerator.autocast():
                outputs = unrolled(batch.tokens, batch.features, self.args.eval_depth)
                outcome = measure(outputs, batch, self.head, self.validation_objective)
            rows.append([1.0, outcome.regression, outcome.entropy, *outcome.agreement])
        sums = torch.tensor([sum(column) for column in zip(*rows, strict=True)], dtype=torch.float64)
        count, *totals = accelerator.reduce(sums.to(accelerator.device), "sum").tolist()
        regression, entropy, *agreement = (round(total / count, 4) for total in totals)
        return {
            "val_regression": regression,
            "val_entropy": entropy,
            "agreement": agreement,
            "expected_tau": round(expected_tau(agreement), 4),
        }

    def write(self, folder: Path) -> None:
        """Writes the drafter into a folder as --drafter_path loads it."""
        write_drafter(folder, self.fields, self.averaged.state_dict(), self.model)


def start_from(net: nn.Module, other: nn.Module, path: str) -> None:
    """Loads the weights of another drafter into net. Raises UserError if its shape differs."""
    try:
        net.load_state_dict({name: tensor.float() for name, tensor in other.state_dict().items()})
    except RuntimeError:
        raise UserError(
            f"--drafter_path {path}: this drafter's layer has another shape; give the drafter's config.json "
            'as --config_path, with "bias": false if it has no fc.bias'
        ) from None


@torch.no_grad()
def blend(average: nn.Module, net: nn.Module, decay: float) -> None:
    """Moves the running average towards the current weights."""
    for mean, value in zip(average.parameters(), net.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)


def prepare(args: Any) -> tuple[Any, Any]:
    """Returns the accelerator of this process, and the options with their device and precision resolved."""
    from accelerate import Accelerator

    if args.threads:
        torch.set_num_threads(args.threads)
    on_cpu = pick_device(args.device) == "cpu"
    precision = args.precision if args.precision != "auto" else "fp32" if on_cpu else "bf16"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if precision == "fp32" else "bf16",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    # A launcher on CPUs calls its processes' devices "cpu:0" and "cpu:1". To the models they are one device.
    device = "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
    return accelerator, replace(args, precision=precision, device=device)


def run(args: Any, loading: LoadOptions) -> None:
    """Trains, validates and saves. The last line printed is one JSON document.

    args: the options of cli/train_drafter.py. loading: how to load the target and, if there is one, the
    drafter that training starts from.
    """
    accelerator, args = prepare(args)
    root = Path(args.save_dir)
    loading = replace(loading, device=args.device, precision=args.precision, keep_text_encoder=True)
    model = load(args.model, loading)
    shards = read_shards([Path(folder) for folder in args.data_dir], model)
    settings = {name: getattr(args, name) for name in FIXED_OPTIONS}
    settings |= {"target": model.weights_sha, "data": shards.digest()}
    settings["processes"] = accelerator.num_processes
    if args.restart and accelerator.is_main_process:
        drafter_states.discard(root)
    accelerator.wait_for_everyone()
    trainer = Trainer(args, model, shards, accelerator)
    settings["config"] = trainer.fields
    saved = drafter_states.resume(root, settings)
    if saved is not None:
        trainer.resume(saved)
    if accelerator.is_main_process:
        drafter_states.cut_log(root, -1 if saved is None else trainer.step)
    loop(trainer, settings, root)


def loop(trainer: Trainer, settings: dict[str, Any], root: Path) -> None:
    """Trains until the end of the run. All processes validate, and the main one alone writes."""
    args, main, losses = trainer.args, trainer.accelerator.is_main_process, list[float]()
    first, epoch_steps, fraction = trainer.step, trainer.steps_per_epoch, trainer.fraction()
    row: dict[str, Any] = {}

    def due(epochs: int) -> bool:
        return done or (trainer.step > first and trainer.step % (epochs * epoch_steps) == 0)

    with tqdm(desc="drafter", unit="step", initial=first, disable=not main) as bar:
        while True:
            done = fraction >= 1.0 or (args.max_steps is not None and trainer.step >= args.max_steps)
            if due(args.eval_freq):
                row = {"step": trainer.step, "epoch": round(trainer.step / epoch_steps, 3),
                       "spent_s": round(trainer.spent_s, 1), "factor": round(trainer.factor(fraction), 5),
                       "loss": round(sum(losses) / len(losses), 5) if losses else None,
                       **trainer.validation()}  # fmt: skip
                # Without losses after step 0 the run was resumed at its end, and nothing is new.
                if main and (losses or trainer.step == 0):
                    append_json(root / drafter_states.LOG, row)
                losses = []
            if due(args.save_freq):
                if main:
                    payload, epoch = trainer.payload(settings), -(-trainer.step // epoch_steps)
                    newest = drafter_states.save(root, epoch, payload, trainer.write)
                trainer.accelerator.wait_for_everyone()
            if done:
                break
            outcome = trainer.train_step(trainer.factor(fraction))
            losses.append(outcome.loss.item())
            fraction = trainer.fraction()
            bar.update()
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, agreement {outcome.agreement[0]:.2f}", refresh=False)
    if main:
        if args.export:
            trainer.write(Path(args.export))
        print(json.dumps({"steps": trainer.step, "drafter": str(newest), **row}))
    trainer.accelerator.wait_for_everyone()
