"""Train the EAGLE drafter on the target's own images: feature regression, guided cross-entropy, training-time test.

Step 1 reads the target's features; step j reads the drafter's own features of step j - 1, as decoding does j levels
into a tree (EAGLE-3's training-time test): entry e of step j attends to target entries up to e - j + 1 and to its own
ancestors, entries e - j + i of steps i = 2..j. Loss a step: SmoothL1 on both guidance branches' features, and soft
cross-entropy between the guided laws of target and drafter, which is what verification compares.
"""

from __future__ import annotations

import argparse
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
from tqdm import tqdm

from adt_tree.sampling import guide
from models.drafter import DrafterNet, to_published
from models.registry import EMOJI, Model, load
from models.target import Prompt
from models.transformer import DecoderConfig
from training.distil import read_distilled
from training.loop import Budget, Every, add_loop_arguments, append_jsonl, load_checkpoint, save_checkpoint
from training.target import optimisers, schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji drafter`."""
    add_loop_arguments(parser, minutes=12, checkpoint_minutes=2)
    parser.add_argument("--model_path", default=None, help="exported target; default: the embedded checkpoint")
    parser.add_argument("--batch_size", type=int, default=16, help="images a step, two guidance branches each")
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps of the training-time test")
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance scale of the cross-entropy")
    parser.add_argument("--feature_weight", type=float, default=1.0, help="of SmoothL1 beside the cross-entropy")
    parser.add_argument("--step_decay", type=float, default=0.8, help="weight of step j is step_decay^(j - 1)")
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


def drafter_loss(net: DrafterNet, batch: Batch, head: Tensor, args: argparse.Namespace) -> tuple[Tensor, list[float]]:
    """The weighted sum over steps, and the agreement a step: sum over codes of min(p, q), the mass a draw from q
    would have accepted."""
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
    """Distilled images as batches; the target's features are recomputed, so nothing vocabulary-sized is stored."""

    def __init__(self, model: Model, rows: list[dict]) -> None:
        self.model = model
        self.images = [(model.encode(row["caption"]), torch.tensor(row["codes"])) for row in rows]

    @torch.no_grad()
    def batch(self, indices: list[int]) -> Batch:
        """The images' conditional rows, then their unconditional rows."""
        chosen = [self.images[index] for index in indices]
        prefixes = [self._prefix(prompt, branch) for branch in (0, 1) for prompt, _ in chosen]
        codes = torch.stack([codes for _, codes in chosen]).repeat(2, 1)
        length = max(map(len, prefixes)) + codes.shape[1]
        tokens = torch.zeros(len(prefixes), length, dtype=torch.int64)
        where = torch.empty(len(prefixes), codes.shape[1] - 1, dtype=torch.int64)
        for row, prefix in enumerate(prefixes):
            tokens[row, : len(prefix)] = torch.tensor(prefix)
            tokens[row, len(prefix) : len(prefix) + codes.shape[1]] = codes[row] + self.model.layout.first_code
            where[row] = torch.arange(codes.shape[1] - 1) + len(prefix) - 1
        return Batch(tokens[:, 1:], self.model.decoder.causal(tokens)[:, :-1], where)

    @staticmethod
    def _prefix(prompt: Prompt, branch: int) -> list[int]:
        return prompt.unconditional if branch else prompt.conditional


def new_drafter(config: DecoderConfig, model: Model) -> DrafterNet:
    """A drafter of the target's width that starts from the target's embedding, kept frozen, and its last layer."""
    net = DrafterNet(config)
    net.embed.load_state_dict(model.decoder.embed.state_dict())
    net.embed.requires_grad_(False)
    net.block.load_state_dict(model.decoder.blocks[-1].state_dict())
    with torch.no_grad():  # start by passing the feature through
        half = config.hidden_size
        net.fc.weight[:, half:] = torch.eye(half)
        nn.init.normal_(net.fc.weight[:, :half], std=0.02)
        net.fc.bias.zero_()
    return net


def export(net: DrafterNet, average: dict[str, Tensor], model: Model, folder: Path) -> None:
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


def run(args: argparse.Namespace) -> None:
    """Train within the budget; write drafter.pt, losses_drafter.jsonl and the checkpoint's drafter folder."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    work = Path(args.work_dir)
    model = load("emoji", args.model_path, None, "fp32", "cpu", need_drafter=False)
    images = Images(model, read_distilled(work))
    if len(images.images) <= args.batch_size:
        raise ValueError(f"{work / 'distilled.jsonl'} holds {len(images.images)} images: run `distil` first")
    held_out, head = args.batch_size, model.decoder.head.weight
    head = head[model.layout.first_code : model.layout.first_code + model.num_codes]
    net = new_drafter(dataclasses.replace(model.decoder.config, num_layers=1), model)
    trained = optimisers(net, args)
    saved = None if args.restart else load_checkpoint(work / "drafter.pt")
    if saved:
        net.load_state_dict(saved["model"])
        for optimiser, state in zip(trained, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
    average = saved["average"] if saved else {name: value.clone() for name, value in net.state_dict().items()}
    step = saved["step"] if saved else 0
    budget, save = Budget(args.minutes, saved["spent_s"] if saved else 0.0), Every(60 * args.checkpoint_minutes)
    rng = random.Random(args.seed + step)
    with tqdm(desc="drafter", unit="step", initial=step, mininterval=5) as bar:
        while not budget.done():
            batch = images.batch(rng.sample(range(held_out, len(images.images)), args.batch_size))
            loss, agreement = drafter_loss(net, batch, head, args)
            update(net, loss, trained, args, schedule(budget.fraction(), step))
            step += 1
            blend(average, net, min(args.ema, step / (step + 10)))
            bar.update()
            if save.due() or budget.done():
                with torch.no_grad():
                    _, unseen = drafter_loss(net, images.batch(list(range(held_out))), head, args)
                append_jsonl(work / "losses_drafter.jsonl", {
                    "step": step, "spent_s": round(budget.spent_s(), 1), "loss": loss.item(),
                    **{f"agreement_{n}": round(value, 4) for n, value in enumerate(unseen, 1)}})  # fmt: skip
                save_checkpoint(work / "drafter.pt", {
                    "model": net.state_dict(), "average": average, "step": step, "spent_s": budget.spent_s(),
                    "optimisers": [optimiser.state_dict() for optimiser in trained]})  # fmt: skip
            elif step % 10 == 0:
                bar.set_postfix(loss=loss.item(), agreement=" ".join(f"{a:.2f}" for a in agreement))
    export(net, average, model, (Path(args.model_path) if args.model_path else EMOJI) / "drafter")


def update(net: nn.Module, loss: Tensor, trained: list[torch.optim.Optimizer], args: argparse.Namespace,
           factor: float) -> None:
    """One optimiser step at `factor` of the learning rates."""
    for optimiser, rate in zip(trained, (args.muon_lr, args.adam_lr), strict=True):
        optimiser.zero_grad(set_to_none=True)
        optimiser.param_groups[0]["lr"] = rate * factor
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optimiser in trained:
        optimiser.step()


@torch.no_grad()
def blend(average: dict[str, Tensor], net: nn.Module, decay: float) -> None:
    """Move the running average towards the current weights."""
    for name, value in net.state_dict().items():
        average[name].lerp_(value, 1 - decay)


def main() -> None:
    """Run as `python -m training.drafter`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
