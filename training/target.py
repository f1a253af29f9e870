"""Train the target: captions -> image codes, cross-entropy on the codes, some prompts empty for guidance.

Hidden matrices by Muon, the rest by AdamW; linear decay to zero over the time budget; the exported weights
are an average over the last part of training. What is fitted is the guided law, at the scale the model is
decoded with (`--cfg`), so that guidance sharpens by what the text says and not by what was memorised twice.
A sequence is [bos] text [separator, image begin] codes, or
[bos, image begin] codes for an empty prompt; right padding is harmless under causal attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from adt_tree.sampling import guide
from models.transformer import Decoder, DecoderConfig
from training.bpe import IMAGE_FIRST, Layout, caption, random_caption
from training.data import read_captions
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
from training.muon import muon_and_adamw

BOS = 0
SEEN = 48  # training pairs of the validation
Packed = tuple[Tensor, Tensor]  # what pack() returns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train_emoji target`."""
    add_loop_arguments(parser, minutes=150, checkpoint_minutes=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--muon_lr", type=float, default=8e-3, help="for hidden matrices")
    parser.add_argument("--adam_lr", type=float, default=3e-3, help="for embedding, head and norms")
    parser.add_argument(
        "--weight_decay", type=float, default=0.02, help="times the learning rate, hidden matrices"
    )
    parser.add_argument("--dropped", type=float, default=0.1, help="share of empty prompts")
    parser.add_argument(
        "--corrupted", type=float, default=0.75, help="share of rows with wrong codes in context"
    )
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance scale of the law that is fitted")
    parser.add_argument(
        "--smoothing", type=float, default=0.01, help="label smoothing: bounds what guidance makes of tails"
    )
    parser.add_argument(
        "--ahead", type=int, default=2, help="codes after the next that features learn to tell, for drafters"
    )
    parser.add_argument("--ahead_weight", type=float, default=0.3, help="share of their mean loss")
    parser.add_argument("--ema", type=float, default=0.99, help="per-step decay of the exported average")
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--num_layers", type=int, default=16)
    parser.add_argument("--num_heads", type=int, default=6)
    parser.add_argument("--intermediate_size", type=int, default=512)
    parser.add_argument("--max_positions", type=int, default=512)
    parser.add_argument("--num_embeddings", type=int, default=1024, help="image codes")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss")


class Prompts:
    """Text -> prefix ids ending in image begin."""

    def __init__(self, tokenizer_path: Path, num_codes: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        self.layout = Layout(num_codes)

    def prefix(self, text: str) -> list[int]:
        """Prefix of a caption; the empty caption gives the unconditional prefix."""
        if not text:
            return [BOS, self.layout.image_begin]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [BOS, *ids, self.layout.separator, self.layout.image_begin]


def pack(prefixes: list[list[int]], codes: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [R, T] (prefix, codes but the last, padding) and index [R, n] of features that predict codes.

    codes [R, n]: codebook ids, 0-based.
    """
    num = codes.shape[1]
    length = max(map(len, prefixes)) + num - 1
    tokens = torch.zeros(len(prefixes), length, dtype=torch.int64)
    where = torch.empty(codes.shape, dtype=torch.int64)
    for row, prefix in enumerate(prefixes):
        tokens[row, : len(prefix)] = torch.tensor(prefix)
        tokens[row, len(prefix) : len(prefix) + num - 1] = codes[row, :-1] + IMAGE_FIRST
        where[row] = torch.arange(num) + len(prefix) - 1
    return tokens, where


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs with their prompts, the same inputs without, and the codes [R, n] to predict."""

    prompted: Packed
    unprompted: Packed
    codes: Tensor


def make_batch(
    prompts: Prompts, texts: list[str], inputs: Tensor, codes: Tensor, device: torch.device
) -> Batch:
    """texts: R captions, some empty; inputs [R, n]: the codes as the model sees them in its context."""

    def packed(texts: list[str]) -> Packed:
        tokens, where = pack([prompts.prefix(text) for text in texts], inputs)
        return tokens.to(device), where.to(device)

    return Batch(packed(texts), packed([""] * len(texts)), codes.to(device))


def corrupt(codes: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Inputs for targets codes [R, n]: in `share` of the rows, a fraction drawn from U(0, 1) of the codes is
    replaced by codes of other cells of the batch.

    A small data set is memorised by its contexts alone; where the context lies, only the text says what
    comes next, and a sampled context, which is never quite a training image, has been seen.
    """
    rows, num = codes.shape
    fraction = torch.rand(rows, 1, generator=generator) * (torch.rand(rows, 1, generator=generator) < share)
    strange = codes.flatten()[torch.randint(codes.numel(), (rows, num), generator=generator)]
    return torch.where(torch.rand(rows, num, generator=generator) < fraction, strange, codes)


def code_features(decoder: Decoder, tokens: Tensor, where: Tensor) -> Tensor:
    """Features [R, n, D] that predict the n codes; tokens [R, T], where [R, n]."""
    features = decoder.causal(tokens)
    return features.gather(1, where[..., None].expand(-1, -1, features.shape[-1]))


def guided_logits(decoder: Decoder, features: Tensor, unprompted: Packed, args: argparse.Namespace) -> Tensor:
    """u + cfg (c - u) [R, n, V] over the image codes' rows of the head only; features [R, n, D] give c.

    u is held constant, and is c in rows without a prompt: these train u itself. Fitting the combination makes
    decoding at this scale calibrated (guidance-free training, Chen et al., arXiv 2501.15420, read backwards);
    fitting c, guidance extrapolates the noise between two memories of the same image.
    """
    head = decoder.head.weight[IMAGE_FIRST : IMAGE_FIRST + args.num_embeddings]
    conditional = F.linear(features, head)
    if args.cfg == 1:
        return conditional
    with torch.no_grad():
        unconditional = F.linear(code_features(decoder, *unprompted), head)
    return guide(torch.stack((conditional, unconditional)), args.cfg)


def code_loss(logits: Tensor, codes: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy in nats a code of logits [R, n, V].

    smoothing: share of the target law that is uniform over the codes: it bounds what guidance makes of tails.
    """
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), label_smoothing=smoothing)


def ahead_loss(heads: nn.ModuleList, features: Tensor, codes: Tensor) -> Tensor:
    """Mean cross-entropy of head k on code p + 1 + k from the feature that predicts code p, k = 1, 2, ...

    A drafter knows the future only through the target's features; these heads (discarded at export) make the
    features hold it (multi-token prediction: Gloeckle et al., arXiv 2404.19737).
    """
    losses = [
        F.cross_entropy(head(features[:, :-k]).flatten(0, 1), codes[:, k:].flatten())
        for k, head in enumerate(heads, 1)
    ]
    return torch.stack(losses).mean()


def training_loss(
    decoder: Decoder, heads: nn.ModuleList, batch: Batch, args: argparse.Namespace, smoothing: float
) -> tuple[Tensor, Tensor]:
    """code_loss of the guided law, and ahead_loss (0 without heads)."""
    features = code_features(decoder, *batch.prompted)
    loss = code_loss(guided_logits(decoder, features, batch.unprompted, args), batch.codes, smoothing)
    return loss, ahead_loss(heads, features, batch.codes) if len(heads) else torch.zeros(())


def initialise(decoder: Decoder) -> None:
    """Normal weights of standard deviation 0.02, residual outputs smaller by the root of twice the depth."""
    depth = decoder.config.num_layers
    for name, param in decoder.named_parameters():
        if param.ndim == 2 and "qk_" not in name:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(
                param, std=0.02 if "blocks" not in name else 0.04 / (2 * depth) ** (0.5 * residual)
            )


def schedule(fraction: float, step: int) -> float:
    """Factor of the learning rates: 20 steps of warm-up, flat to 30 % of the budget, then linear to 0.02."""
    return min((step + 1) / 20, 1.0) * max(min(1.0, (1 - fraction) / 0.7), 0.02)


class Trainer:
    """Data, model, its average, optimisers and random stream of a run."""

    def __init__(self, args: argparse.Namespace, work: Path, device: torch.device) -> None:
        """Data and random streams stay on the CPU: draws are the same on every device."""
        torch.manual_seed(args.seed)
        self.args, self.rng, self.device = args, random.Random(args.seed), device
        self.prompts = Prompts(work / "text_tokenizer.json", args.num_embeddings)
        rows = read_captions(work)
        self.codes = torch.from_numpy(np.load(work / "codes.npy")).long()
        self.train = [row for row in rows if row["split"] == "train"]
        self.held_out = [row for row in rows if row["split"] == "held_out"]
        config = DecoderConfig(
            vocab_size=self.prompts.tokenizer.get_vocab_size(),
            hidden_size=args.hidden_size,
            intermediate_size=args.intermediate_size,
            num_layers=args.num_layers,
            num_heads=args.num_heads,
            max_positions=args.max_positions,
        )
        self.decoder = Decoder(config)
        initialise(self.decoder)
        self.decoder.to(device)
        self.heads = nn.ModuleList(
            nn.Linear(args.hidden_size, args.num_embeddings, bias=False) for _ in range(args.ahead)
        ).to(device)
        self.average = {name: value.clone() for name, value in self.decoder.state_dict().items()}
        self.optimisers = muon_and_adamw(
            self.decoder, args.muon_lr, args.adam_lr, args.weight_decay, self.heads
        )
        self.loss = torch.compile(training_loss, dynamic=True) if args.compile else training_loss
        self.noise = torch.Generator().manual_seed(args.seed)
        self.order: list[int] = []
        self.step, self.spent_s = 0, 0.0

    def payload(self, spent_s: float) -> dict:
        """What a resume needs, and what the export reads."""
        return {"model": self.decoder.state_dict(), "average": self.average, "step": self.step,
                "spent_s": spent_s, "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
                "heads": self.heads.state_dict(), "cfg": self.args.cfg,
                "config": dataclasses.asdict(self.decoder.config),
                "num_codes": self.args.num_embeddings}  # fmt: skip

    def resume(self, payload: dict) -> None:
        """Continue a saved run; the data order restarts from a seed that depends on the step.

        StageError if it fits another law, or has other heads.
        """
        heads = payload.get("heads", {})
        if payload.get("cfg") != self.args.cfg or heads.keys() != self.heads.state_dict().keys():
            raise StageError(
                f"target.pt was trained with --cfg {payload.get('cfg')} and --ahead {len(heads)}, not with "
                f"--cfg {self.args.cfg:g} and --ahead {self.args.ahead}: give the same, or `target --restart`"
            )
        self.decoder.load_state_dict(payload["model"])
        self.heads.load_state_dict(payload["heads"])
        self.average = {name: value.to(self.device) for name, value in payload["average"].items()}
        for optimiser, state in zip(self.optimisers, payload["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.spent_s = payload["step"], payload["spent_s"]
        self.rng = random.Random(self.args.seed + self.step)
        self.noise.manual_seed(self.args.seed + self.step)

    def batch(self) -> tuple[list[str], Tensor]:
        """Captions and codes of the next images; every epoch is a new permutation of the training pairs."""
        chosen = []
        while len(chosen) < self.args.batch_size:
            if not self.order:
                self.order = self.rng.sample(range(len(self.train)), len(self.train))
            chosen.append(self.train[self.order.pop()])
        texts = [
            "" if self.rng.random() < self.args.dropped else random_caption(row, self.rng) for row in chosen
        ]
        return texts, self.codes[[row["index"] for row in chosen]]

    def train_step(self, factor: float) -> float:
        """One update at `factor` of the learning rates; the loss."""
        texts, codes = self.batch()
        inputs = corrupt(codes, self.args.corrupted, self.noise)
        batch = make_batch(self.prompts, texts, inputs, codes, self.device)
        loss, ahead = self.loss(self.decoder, self.heads, batch, self.args, self.args.smoothing)
        for optimiser, rate in zip(self.optimisers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            optimiser.zero_grad(set_to_none=True)
            optimiser.param_groups[0]["lr"] = rate * factor
        (loss + self.args.ahead_weight * ahead).backward()
        nn.utils.clip_grad_norm_([*self.decoder.parameters(), *self.heads.parameters()], 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        decay = min(self.args.ema, self.step / (self.step + 10))
        with torch.no_grad():
            for name, value in self.decoder.state_dict().items():
                self.average[name].lerp_(value, 1 - decay)
        return loss.item()

    @torch.no_grad()
    def validation(self) -> dict[str, float]:
        """Loss with bare captions on the held-out pairs and on SEEN training pairs, current weights."""
        losses = {}
        for label, rows in (
            ("held_out", self.held_out),
            ("seen", self.train[:: max(1, len(self.train) // SEEN)][:SEEN]),
        ):
            codes = self.codes[[row["index"] for row in rows]]
            texts = [caption(row["style"], row["name"], []) for row in rows]
            batch = make_batch(self.prompts, texts, codes, codes, self.device)
            losses[label] = training_loss(self.decoder, self.heads, batch, self.args, 0.0)[0].item()
        return losses


def run(args: argparse.Namespace) -> None:
    """Train within the budget; write target.pt and losses_target.jsonl."""
    device = use_device(args)
    work = Path(args.work_dir)
    trainer = Trainer(args, work, device)
    if args.restart:
        discard(work / "target.pt", work / "losses_target.jsonl")
    if saved := load_checkpoint(work / "target.pt"):
        trainer.resume(saved)
    budget, save = Budget(args.minutes, trainer.spent_s), Every(60 * args.checkpoint_minutes)
    losses: list[float] = []
    with tqdm(desc="target", unit="step", initial=trainer.step, mininterval=5) as bar:
        done = budget.ends(trainer.step, args.max_steps)
        while not done:
            losses.append(trainer.train_step(schedule(budget.fraction(), trainer.step)))
            bar.update()
            done = budget.ends(trainer.step, args.max_steps)
            if save.due() or done:
                row = {"step": trainer.step, "spent_s": round(budget.spent_s(), 1),
                       "train": sum(losses) / len(losses), **trainer.validation()}  # fmt: skip
                append_jsonl(work / "losses_target.jsonl", row)
                save_checkpoint(work / "target.pt", trainer.payload(budget.spent_s()))
                losses.clear()
            elif trainer.step % 10 == 0:
                bar.set_postfix(loss=sum(losses[-10:]) / len(losses[-10:]))
    print(json.dumps({"steps": trainer.step, "spent_s": budget.spent_s(), **trainer.validation()}))
