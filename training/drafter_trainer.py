"""Trains an EAGLE drafter for a target on stored images, in one process or several (train_drafter).

Everything random is a function of the seed, the epoch and the step. So a resumed run continues exactly as an
uninterrupted one, if its length is given in epochs.
"""

from __future__ import annotations

import copy
import math
import random
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from adt_tree.errors import UserError, as_seed
from models.checkpoint.files import append_json
from models.family import LoadOptions
from models.loading import load, pick_device
from models.model import Model
from storage.ownership import owned
from training import drafter_states
from training.drafter_data import Images, epoch_order, noised, split
from training.drafter_loss import Objective, Outcome, Unrolled, expected_tau, measure
from training.drafter_settings import DrafterSettings, StepSettings
from training.muon import muon_and_adamw
from training.new_drafter import default_fields, new_drafter, read_fields_of, write_drafter
from training.shards import Shards, read_shards

if TYPE_CHECKING:
    from accelerate import Accelerator


class Trainer:
    """One process of a run: the network and its running average, the optimisers, the images, the progress.

    A step of the optimisers uses the gradients of gradient_accumulation_steps passes. In a pass every process
    reads bs images.
    """

    def __init__(
        self, settings: DrafterSettings, model: Model, shards: Shards, accelerator: Accelerator
    ) -> None:
        torch.manual_seed(as_seed(settings.seed))
        self.settings, self.model, self.accelerator = settings, model, accelerator
        self.images = Images(model, shards, int(settings.cache_gb * 1e9), settings.max_len)
        self.train, self.held_out = split(shards.names, settings.train_data_ratio, settings.seed)
        self.pass_images = settings.bs * accelerator.num_processes
        self.step_images = self.pass_images * settings.gradient_accumulation_steps
        if len(self.train) < self.step_images:
            raise UserError(
                f"bs {settings.bs}: a step takes {self.step_images} images, and {len(self.train)} of the "
                f"{len(shards)} are for training; make more, or give a smaller one"
            )
        self.steps_per_epoch = len(self.train) // self.step_images
        self.step, self._start = 0, time.monotonic()
        # The first features pack the decoder, which puts other layers into it; gradients flow through these.
        head = model.decoder.head
        self.head = nn.Sequential(*head) if isinstance(head, nn.Sequential) else head
        guidance = settings.cfg_scale if settings.cfg_loss else None
        self.objective = Objective(settings.ttt_steps, settings.p_w, settings.step_decay, guidance)
        config = settings.config_path
        self.fields = default_fields(model) if config is None else read_fields_of(Path(config), model)
        self.net = new_drafter(self.fields, model)
        if model.drafter_net is not None:
            start_from(self.net, model.drafter_net, settings.drafter_path)
        self.net.requires_grad_(True).embed.requires_grad_(False)
        self.optimisers = self._optimisers()
        self.averaged = copy.deepcopy(self.net).requires_grad_(False)
        self.module = accelerator.prepare(Unrolled(self.net))

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        lr, decay = self.settings.lr, self.settings.weight_decay
        trained = [p for p in self.net.parameters() if p.requires_grad]
        optimisers: list[torch.optim.Optimizer] = (
            [torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=decay)]
            if self.settings.optimizer == "adamw"
            else muon_and_adamw(self.net, self.settings.muon_lr, lr, decay)
        )
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

        if self.settings.minutes is None:
            return min(self.step / (self.settings.num_epochs * self.steps_per_epoch), 1.0)
        share = min(self.spent_s / (60 * self.settings.minutes), 1.0)
        return float(broadcast(torch.tensor(share, dtype=torch.float64, device=self.accelerator.device)))

    def factor(self, fraction: float) -> float:
        """Returns the factor of the learning rates at a fraction of the run.

        It rises over the warm-up, stays at 1 until flat_ratio, then falls linearly to 0. Warm-up and
        flat_ratio are shares of the whole run, not of its first epoch.
        """
        warm = self.settings.warmup_steps_ratio if self.settings.is_warmup else 0.0
        one_step = 1 / (self.settings.num_epochs * self.steps_per_epoch)  # lets the first factor exceed 0
        flat = min(max(self.settings.flat_ratio, warm), 1 - 1e-9)
        rise = min((fraction + one_step) / warm, 1.0) if warm else 1.0
        return rise * min((1 - fraction) / (1 - flat), 1.0)

    def payload(self, fixed: dict[str, Any]) -> dict[str, Any]:
        """Returns the state that a resumed run needs. fixed: the values that it must share."""
        return {
            "net": self.net.state_dict(), "average": self.averaged.state_dict(), "step": self.step,
            "spent_s": self.spent_s, "optimisers": [o.state_dict() for o in self.optimisers],
            "settings": fixed,
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
        order = epoch_order(self.train, self.settings.seed, epoch)
        start = place * self.step_images + number * self.pass_images
        rank = self.accelerator.process_index
        images = order[start + rank : start + self.pass_images : self.accelerator.num_processes]
        settings, seed = self.settings, self.settings.seed
        stream = ((seed * 1_000_003 + self.step) * 1009 + number) * 1009 + rank
        batch = self.images.batch(images, None if settings.coupled else random.Random(stream))
        generator = torch.Generator().manual_seed(as_seed(stream))
        inputs = noised(batch, settings.data_noise, settings.mean, settings.std, generator)
        with self.accelerator.accumulate(self.module), self.accelerator.autocast():
            outputs = self.module(batch.tokens, inputs, settings.ttt_steps)
            outcome = measure(outputs, batch, self.head, self.objective)
            self.accelerator.backward(outcome.loss)
        return outcome

    def train_step(self, factor: float) -> tuple[float, float]:
        """Updates the weights at `factor` times the learning rates.

        Returns the loss, a mean over passes and processes, and the agreement of the last pass. Raises
        FloatingPointError, before the update and in every process, if the loss is not finite.
        """
        settings = self.settings
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["initial_lr"] * factor
        outcomes = [self.pass_outcome(number) for number in range(settings.gradient_accumulation_steps)]
        losses = torch.stack([outcome.loss.detach() for outcome in outcomes])
        loss = self.accelerator.reduce(losses.mean(), "mean").item()
        self.require_finite(f"the loss of step {self.step + 1}", loss)
        if settings.grad_clip:
            by_value = settings.grad_clip_by == "value"
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(self.net.parameters(), settings.grad_clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        blend(self.averaged, self.net, min(settings.ema, self.step / (self.step + 10)))
        return loss, outcomes[-1].agreement[0]

    def require_finite(self, what: str, value: float) -> None:
        """Raises FloatingPointError, which names the learning rate, if a value is not finite."""
        if not math.isfinite(value):
            rates = " and ".join(f"{optimiser.param_groups[0]['lr']:g}" for optimiser in self.optimisers)
            raise FloatingPointError(
                f"{what} is {value} at learning rate {rates}; the last saved state is kept. "
                "Give a smaller rate and another folder for states, or data whose features are finite"
            )

    @torch.no_grad()
    def validation(self) -> dict[str, Any]:
        """Returns loss and agreement by level on the held-out images, for the averaged weights.

        All processes must call this. Each measures its share of the batches, because processes that wait
        while one works would run into the time-out of their group.
        """
        self.averaged.eval()
        unrolled, size, accelerator = Unrolled(self.averaged), self.settings.bs, self.accelerator
        depth, cfg_scale = self.settings.eval_depth, self.settings.cfg_scale
        objective = replace(self.objective, steps=depth, guidance=cfg_scale)
        starts = range(0, len(self.held_out), size)[accelerator.process_index :: accelerator.num_processes]
        rows = [[0.0] * (3 + depth)]  # of each batch: 1, regression, entropy, agreement
        for start in tqdm(starts, "validation", unit="batch", leave=False):
            batch = self.images.batch(self.held_out[start : start + size], None)
            with accelerator.autocast():
                outputs = unrolled(batch.tokens, batch.features, depth)
                outcome = measure(outputs, batch, self.head, objective)
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


def start_from(net: nn.Module, other: nn.Module, path: str | None) -> None:
    """Loads the weights of another drafter into net. Raises UserError if its shape differs."""
    try:
        net.load_state_dict({name: tensor.float() for name, tensor in other.state_dict().items()})
    except RuntimeError:
        raise UserError(
            f"drafter_path {path}: this drafter's layer has another shape; give the drafter's config.json "
            'as config_path, with "bias": false if it has no fc.bias'
        ) from None


@torch.no_grad()
def blend(average: nn.Module, net: nn.Module, decay: float) -> None:
    """Moves the running average towards the current weights."""
    for mean, value in zip(average.parameters(), net.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)


def prepare(settings: DrafterSettings) -> tuple[Accelerator, DrafterSettings]:
    """Returns the accelerator of this process, and the settings with their device and precision resolved."""
    from accelerate import Accelerator

    if settings.threads:
        torch.set_num_threads(settings.threads)
    on_cpu = pick_device(settings.device) == "cpu"
    by_device = "fp32" if on_cpu else "bf16"
    precision = by_device if settings.precision == "auto" else settings.precision
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if precision == "fp32" else "bf16",
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
    )
    # A launcher on CPUs calls its processes' devices "cpu:0" and "cpu:1". To the models they are one device.
    device = "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
    return accelerator, replace(settings, precision=precision, device=device)


def run(settings: DrafterSettings, name: str, loading: LoadOptions) -> dict[str, Any] | None:
    """Trains, validates and saves. Returns what was reached; None in processes beside the main one.

    name: of the target's family. loading: how to load the target and, if there is one, the drafter that
    training starts from.
    """
    accelerator, settings = prepare(settings)
    root = Path(settings.save_dir)
    loading = replace(loading, device=settings.device, precision=settings.precision, keep_text_encoder=True)
    model = load(name, loading)
    shards = read_shards([Path(folder) for folder in settings.data_dir], model)
    trainer = Trainer(settings, model, shards, accelerator)
    fixed = {item.name: getattr(settings, item.name) for item in fields(StepSettings)}
    fixed |= {"target": model.weights_sha, "data": shards.digest(), "config": trainer.fields}
    fixed["processes"] = accelerator.num_processes
    with owned(root) if accelerator.is_main_process else nullcontext():
        if settings.restart and accelerator.is_main_process:
            drafter_states.discard(root)
        accelerator.wait_for_everyone()
        saved = drafter_states.resume(root, fixed)
        if saved is not None:
            trainer.resume(saved)
        if accelerator.is_main_process:
            drafter_states.cut_log(root, -1 if saved is None else trainer.step)
        return loop(trainer, fixed, root)


def loop(trainer: Trainer, fixed: dict[str, Any], root: Path) -> dict[str, Any] | None:
    """Trains until the end of the run. All processes validate, and the main one alone writes."""
    settings, main, losses = trainer.settings, trainer.accelerator.is_main_process, list[float]()
    first, epoch_steps, fraction = trainer.step, trainer.steps_per_epoch, trainer.fraction()
    row: dict[str, Any] = {}

    def due(epochs: int) -> bool:
        return done or (trainer.step > first and trainer.step % (epochs * epoch_steps) == 0)

    with tqdm(desc="drafter", unit="step", initial=first, disable=not main) as bar:
        while True:
            done = fraction >= 1.0 or (settings.max_steps is not None and trainer.step >= settings.max_steps)
            if due(settings.eval_freq):
                row = {"step": trainer.step, "epoch": round(trainer.step / epoch_steps, 3),
                       "spent_s": round(trainer.spent_s, 1), "factor": round(trainer.factor(fraction), 5),
                       "loss": round(sum(losses) / len(losses), 5) if losses else None,
                       **trainer.validation()}  # fmt: skip
                # Without losses after step 0 the run was resumed at its end, and nothing is new.
                if main and (losses or trainer.step == 0):
                    append_json(root / drafter_states.LOG, row)
                losses = []
            if due(settings.save_freq):
                norm = nn.utils.get_total_norm([*trainer.net.parameters()])
                trainer.require_finite(f"the norm of the weights after step {trainer.step}", norm.item())
                if main:
                    newest = drafter_states.save(root, trainer.step, trainer.payload(fixed), trainer.write)
                trainer.accelerator.wait_for_everyone()
            if done:
                break
            loss, agreement = trainer.train_step(trainer.factor(fraction))
            losses.append(loss)
            fraction = trainer.fraction()
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}, agreement {agreement:.2f}", refresh=False)
    if main and settings.export:
        trainer.write(Path(settings.export))
    trainer.accelerator.wait_for_everyone()
    return {"steps": trainer.step, "drafter": str(newest), **row} if main else None
