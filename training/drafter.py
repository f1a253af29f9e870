"""Train the EAGLE drafter on the target's own images: features, guided cross-entropy, training-time test.

Step 1 reads the target's features; step j reads the drafter's own features of step j - 1, as decoding does j
levels into a tree (EAGLE-3's training-time test): entry e of step j attends to target entries up to e - j + 1
and to its own ancestors, entries e - j + i of steps i = 2..j. Loss a step: SmoothL1 on the features of both
guidance branches, and soft cross-entropy between the guided laws, which are what verification compares.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from adt_tree.sampling import guide
from models.drafter import DrafterNet, to_published
from models.model import Model
from models.registry import EMOJI
from models.transformer import DecoderConfig
from training.distil import load_target, read_distilled, refuse_other_target
from training.errors import StageError
from training.loop import (
    Budget,
    Every,
    add_loop_arguments,
    append_jsonl,
    discard,
    load_checkpoint,
    save_checkpoint,
    use_device,
)
from training.target import optimisers, schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji drafter`."""
    add_loop_arguments(parser, minutes=18, checkpoint_minutes=2)
    parser.add_argument(
        "--model_path", default=None, help="exported target; default: the embedded checkpoint"
    )
    parser.add_argument(
        "--batch_size", type=int, default=16, help="images a step, two guidance branches each"
    )
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps of the training-time test")
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance scale of the cross-entropy")
    parser.add_argument(
        "--feature_weight", type=float, default=1.0, help="of SmoothL1 beside the cross-entropy"
    )
    parser.add_argument(
        "--step_decay", type=float, default=0.8, help="weight of step j is step_decay^(j - 1)"
    )
    parser.add_argument("--muon_lr", type=float, default=5e-3, help="for matrices")
    parser.add_argument("--adam_lr", type=float, default=1e-3, help="for everything else")
    parser.add_argument("--weight_decay", type=float, default=0.02, help="times the learning rate, matrices")
    parser.add_argument("--ema", type=float, default=0.99, help="per-step decay of the exported average")


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch; dimensions: G = 2 branches, B images, R = G * B rows, T tokens, n codes, D features."""

    tokens: Tensor  # [R, T] the token after each entry: entry e pairs feature e with token e + 1
    features: Tensor  # [R, T, D] target features
    where: Tensor  # [R, n - 1] entries whose output predicts the feature of code 0 .. n - 2


def unroll(net: DrafterNet, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield each step's predicted features [R, T, D]; output e of a step predicts feature e + 1."""
    attention, length = net.block.attention, tokens.shape[1]
    turn = net.turn(torch.arange(length, device=tokens.device)[None])
    entry = torch.arange(length, device=tokens.device)
    distance = entry[:, None] - entry
    held: list[Tensor] = []
    for step in range(1, steps + 1):
        x = net.fuse(tokens, features)
        query, kv = attention.project(net.block.attention_norm(x), turn)
        held.append(kv)
        own = [distance == step - index for index in range(2, step + 1)]
        key, value = torch.cat(held, dim=1).transpose(1, 3).unbind(2)
        mask = torch.cat([distance >= step - 1, *own], dim=1)
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask)
        x = x + attention.out(mixed.transpose(1, 2).flatten(2))
        out = x + net.block.mlp(net.block.mlp_norm(x))
        yield out
        features = torch.cat((features[:, :1], out[:, :-1]), dim=1)


def at_codes(x: Tensor, where: Tensor) -> Tensor:
    """x [R, T, D] at entries where [R, m] -> [R, m, D]."""
    return x.gather(1, where[..., None].expand(-1, -1, x.shape[-1]))


def drafter_loss(
    net: DrafterNet, batch: Batch, head: Tensor, args: argparse.Namespace
) -> tuple[Tensor, list[float]]:
    """The weighted sum over steps, and each step's agreement: sum over codes of min(p, q), the share of draws
    from q that the best rule accepts."""
    wanted = at_codes(batch.features, batch.where + 1)
    law = guide(F.linear(wanted, head).unflatten(0, (2, -1)), args.cfg).softmax(dim=-1)
    total, agreement = torch.zeros(()), []
    for step, out in enumerate(unroll(net, batch.tokens, batch.features, args.steps)):
        drafted = at_codes(out, batch.where)
        log_q = guide(F.linear(drafted, head).unflatten(0, (2, -1)), args.cfg).log_softmax(dim=-1)
        entropy = -(law * log_q).sum(dim=-1).mean()
        regression = F.smooth_l1_loss(drafted, wanted)
        total = total + args.step_decay**step * (entropy + args.feature_weight * regression)
        agreement.append(torch.minimum(law, log_q.exp()).sum(dim=-1).mean().item())
    return total, agreement


class Images:
    """Distilled images with the target's features of both branches, computed once and kept in memory."""

    def __init__(self, model: Model, rows: list[dict], batch_size: int) -> None:
        self.first_code, self.device = model.first_code, model.codebook.device
        self.codes = [torch.tensor(row["codes"]) for row in rows]
        prompts = [model.encode(row["caption"]) for row in rows]
        self.prefixes = [(prompt.conditional, prompt.unconditional) for prompt in prompts]
        self.features: list[list[Tensor]] = []  # an image's branches, [T_g, D] each
        for start in tqdm(range(0, len(rows), batch_size), desc="features", unit="batch"):
            indices = list(range(start, min(start + batch_size, len(rows))))
            tokens, lengths = self._tokens(indices)
            with torch.no_grad():
                hidden = model.decoder.causal(tokens.to(self.device))
            kept = [row[:length].clone() for row, length in zip(hidden, lengths, strict=True)]
            self.features += [
                list(pair) for pair in zip(kept[: len(indices)], kept[len(indices) :], strict=True)
            ]

    def _tokens(self, indices: list[int]) -> tuple[Tensor, list[int]]:
        """Right-padded sequences [R, T], all conditional ones first, and their lengths."""
        rows = [
            torch.cat((torch.tensor(self.prefixes[i][branch]), self.codes[i] + self.first_code))
            for branch in (0, 1)
            for i in indices
        ]
        return pad_sequence(rows, batch_first=True), [len(row) for row in rows]

    def batch(self, indices: list[int]) -> Batch:
        """The images' conditional rows, then their unconditional rows."""
        tokens, _ = self._tokens(indices)
        rows = [self.features[i][branch] for branch in (0, 1) for i in indices]
        starts = torch.tensor([len(self.prefixes[i][branch]) - 1 for branch in (0, 1) for i in indices])
        where = starts[:, None] + torch.arange(len(self.codes[0]) - 1)
        features = pad_sequence(rows, batch_first=True)[:, :-1]
        return Batch(tokens[:, 1:].to(self.device), features, where.to(self.device))


def new_drafter(config: DecoderConfig, model: Model) -> DrafterNet:
    """A drafter that starts from the target's embedding, kept frozen, and the target's last layer."""
    net = DrafterNet(config)
    net.embed.load_state_dict(model.decoder.embed.state_dict())
    net.embed.requires_grad_(False)
    net.block.load_state_dict(model.decoder.blocks[-1].state_dict())
    with torch.no_grad():  # start by passing the feature through
        half = config.hidden_size
        net.fc.weight[:, half:] = torch.eye(half)
        nn.init.normal_(net.fc.weight[:, :half], std=0.02)
        net.fc.bias.zero_()
    return net.to(model.codebook.device)


def export(net: DrafterNet, average: dict[str, Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors (bf16) in the published drafter layout."""
    shape = net.config
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "chameleon", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
              "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
              "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
              "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta, "hidden_act": "silu",
              "max_position_embeddings": shape.max_positions, "bias": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in to_published(average, shape).items()}
    save_file(weights, folder / "model.safetensors")


class Trainer:
    """Network, its running average, optimisers, images and random stream of a run, on the model's device."""

    def __init__(self, args: argparse.Namespace, model: Model, rows: list[dict]) -> None:
        torch.manual_seed(args.seed)
        self.args, self.rng, self.weights_sha = args, random.Random(args.seed), model.weights_sha
        self.images = Images(model, rows, args.batch_size)
        first = model.first_code
        self.head = model.decoder.head.weight[first : first + model.num_codes]
        self.net = new_drafter(dataclasses.replace(model.decoder.config, num_layers=1), model)
        self.optimisers = optimisers(self.net, args)
        self.averaged = copy.deepcopy(self.net).requires_grad_(False)
        self.average = self.averaged.state_dict()  # its very tensors: blend() moves the network
        self.step, self.spent_s = 0, 0.0

    def payload(self, spent_s: float) -> dict:
        """What a resume needs."""
        states = [optimiser.state_dict() for optimiser in self.optimisers]
        return {"model": self.net.state_dict(), "average": self.average, "step": self.step,
                "spent_s": spent_s, "optimisers": states, "target": self.weights_sha}  # fmt: skip

    def resume(self, payload: dict) -> None:
        """Continue a saved run; the order of images restarts from a seed that depends on the step."""
        self.net.load_state_dict(payload["model"])
        self.averaged.load_state_dict(payload["average"])
        self.step, self.spent_s = payload["step"], payload["spent_s"]
        for optimiser, state in zip(self.optimisers, payload["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.rng = random.Random(self.args.seed + self.step)

    def train_step(self, factor: float) -> tuple[float, list[float]]:
        """One update at `factor` of the learning rates: loss and agreements. The first images stay unseen."""
        indices = self.rng.sample(range(self.args.batch_size, len(self.images.codes)), self.args.batch_size)
        loss, agreement = drafter_loss(self.net, self.images.batch(indices), self.head, self.args)
        for optimiser, rate in zip(self.optimisers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            optimiser.zero_grad(set_to_none=True)
            optimiser.param_groups[0]["lr"] = rate * factor
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        blend(self.average, self.net, min(self.args.ema, self.step / (self.step + 10)))
        return loss.item(), agreement

    @torch.no_grad()
    def validation(self) -> dict[str, float]:
        """Agreement of each unrolled step on the images kept out of training, averaged weights: those that
        are exported."""
        batch = self.images.batch(list(range(self.args.batch_size)))
        _, agreement = drafter_loss(self.averaged, batch, self.head, self.args)
        return {f"agreement_{number}": round(value, 4) for number, value in enumerate(agreement, 1)}


def run(args: argparse.Namespace) -> None:
    """Train within the budget; write drafter.pt, losses_drafter.jsonl and the checkpoint's drafter folder."""
    work = Path(args.work_dir)
    model = load_target(args.model_path, use_device(args))
    rows = read_distilled(work, model.weights_sha)
    if len(rows) < 2 * args.batch_size:
        raise StageError(
            f"{work / 'distilled.jsonl'}: {len(rows)} images, {2 * args.batch_size} needed: run `distil`"
        )
    if args.restart:
        discard(work / "drafter.pt", work / "losses_drafter.jsonl")
    saved = load_checkpoint(work / "drafter.pt")
    if saved:
        refuse_other_target(work / "drafter.pt", saved.get("target"), model.weights_sha, "drafter")
    trainer = Trainer(args, model, rows)
    if saved:
        trainer.resume(saved)
    budget, save = Budget(args.minutes, trainer.spent_s), Every(60 * args.checkpoint_minutes)
    with tqdm(desc="drafter", unit="step", initial=trainer.step, mininterval=5) as bar:
        done = budget.ends(trainer.step, args.max_steps)
        while not done:
            loss, agreement = trainer.train_step(schedule(budget.fraction(), trainer.step))
            bar.update()
            done = budget.ends(trainer.step, args.max_steps)
            if save.due() or done:
                row = {"step": trainer.step, "spent_s": round(budget.spent_s(), 1), "loss": round(loss, 4)}
                append_jsonl(work / "losses_drafter.jsonl", {**row, **trainer.validation()})
                save_checkpoint(work / "drafter.pt", trainer.payload(budget.spent_s()))
            elif trainer.step % 10 == 0:
                bar.set_postfix(loss=loss, agreement=" ".join(f"{value:.2f}" for value in agreement))
    export(trainer.net, trainer.average, (Path(args.model_path) if args.model_path else EMOJI) / "drafter")
    print(json.dumps({"steps": trainer.step, "spent_s": round(budget.spent_s(), 1), **trainer.validation()}))


@torch.no_grad()
def blend(average: dict[str, Tensor], net: nn.Module, decay: float) -> None:
    """Move the running average towards the current weights."""
    for name, value in net.state_dict().items():
        average[name].lerp_(value, 1 - decay)
