"""Train the target: captions -> image codes, plain cross-entropy, some prompts empty for guidance.

One pass: every picture is drawn once. The learning rates rise, then stay level until --decay_pictures takes
them to zero on a copy of the state, so that a run can be stopped, shown and gone on with at any time. Hidden
matrices by Muon, the rest by AdamW. bf16 and --compile make it three times faster on a CPU with AMX; without
bf16 units bf16 is a hundred times slower.
A sequence is [bos] text [separator, image begin] codes, or [bos, image begin] codes for an empty prompt;
right padding is harmless under causal attention.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as TextTokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from adt_tree.errors import UserError
from models.checkpoint.files import append_line
from models.transformer import Decoder, DecoderConfig
from training.emoji.bpe import IMAGE_FIRST, Layout, caption
from training.emoji.codes import Codes
from training.emoji.pictures import Picture, Pictures
from training.emoji.tokenizer import Tokenizer
from training.loop import Every, load_checkpoint, save_checkpoint, use_device
from training.muon import muon_and_adamw

BOS = 0
LENGTHS = 16  # sequences are padded to a multiple of it, so that --compile meets few shapes
IGNORED = -100  # target where no code is predicted
WARMUP = 100  # steps
LOG = "losses_target.jsonl"
STREAM = "train0"  # of pictures; the number is of the time when several processes had one each
STABLE, DECAYED = "target.pt", "target_decayed.pt"


class Prompts:
    """Text -> prefix ids ending in image begin."""

    def __init__(self, tokenizer_path: Path, num_codes: int) -> None:
        self.tokenizer = TextTokenizer.from_file(str(tokenizer_path))
        self.layout = Layout(num_codes)

    def prefix(self, text: str) -> list[int]:
        """Prefix of a caption; the empty caption gives the unconditional prefix."""
        if not text:
            return [BOS, self.layout.image_begin]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [BOS, *ids, self.layout.separator, self.layout.image_begin]

    def pack(self, texts: list[str], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [R, T] (prefix, codes but the last, padding) and what each predicts [R, T]: a code, 0-based,
        or IGNORED. codes [R, n]."""
        prefixes, num = [self.prefix(text) for text in texts], codes.shape[1]
        length = -(-(max(map(len, prefixes)) + num - 1) // LENGTHS) * LENGTHS
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        wanted = torch.full((len(texts), length), IGNORED)
        for row, prefix in enumerate(prefixes):
            start = len(prefix)
            tokens[row, :start] = torch.tensor(prefix)
            tokens[row, start : start + num - 1] = codes[row, :-1] + IMAGE_FIRST
            wanted[row, start - 1 : start - 1 + num] = codes[row]
        return tokens, wanted


def code_loss(decoder: Decoder, tokens: Tensor, wanted: Tensor, num_codes: int) -> Tensor:
    """Mean cross-entropy in nats a code, over the image codes' rows of the head; tokens, wanted [R, T]."""
    head = decoder.head.weight[IMAGE_FIRST : IMAGE_FIRST + num_codes]
    logits = F.linear(decoder.causal(tokens), head)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)


def initialise(decoder: Decoder) -> None:
    """Normal weights of standard deviation 0.04 (0.02 outside the blocks), residual outputs smaller by the
    root of twice the depth."""
    depth = decoder.config.num_layers
    for name, param in decoder.named_parameters():
        if param.ndim == 2 and "qk_" not in name:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.04 / (2 * depth) ** (0.5 * residual) if "blocks" in name else 0.02
            nn.init.normal_(param, std=std)


class Trainer:
    """Data, model and optimisers of a run."""

    def __init__(self, args: Any, device: torch.device) -> None:
        work = Path(args.work_dir)
        torch.manual_seed(args.seed)
        self.args, self.device = args, device
        tokenizer = Tokenizer.load(work, device)
        self.num_codes = tokenizer.model.config.num_embeddings
        self.codes = Codes(work, Pictures(work), tokenizer)
        self.prompts = Prompts(work / "text_tokenizer.json", self.num_codes)
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
        self.half = args.precision == "bf16"
        dtype = torch.bfloat16 if self.half else torch.float32
        self.optimisers = muon_and_adamw(self.decoder, args.muon_lr, args.adam_lr, args.weight_decay, dtype)
        self.loss = torch.compile(code_loss, dynamic=False) if args.compile else code_loss
        self.step, self.drawn, self.pictures, self.spent_s = 0, 0, 0, 0.0
        self.decay_from: int | None = None
        self.fresh_from = 0  # step at which the optimisers began

    def payload(self, spent_s: float) -> dict:
        """What a resume needs, and what the export reads. drawn: pictures of the stream."""
        return {"model": self.decoder.state_dict(), "step": self.step, "drawn": self.drawn,
                "pictures": self.pictures, "spent_s": spent_s, "decay_from": self.decay_from,
                "fresh_from": self.fresh_from,
                "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
                "config": dataclasses.asdict(self.decoder.config), "codes": self.codes.digest}  # fmt: skip

    def resume(self, payload: dict, name: str) -> None:
        """Continue a saved run, a restored one with fresh optimisers. UserError if it learnt other codes or
        has another shape."""
        if payload["codes"] != self.codes.digest:
            raise UserError(f"{name} learnt another tokenizer.pt's codes: put it back or `target --restart`")
        if payload["config"] != dataclasses.asdict(self.decoder.config):
            raise UserError(f"{name} has the shape {payload['config']}: give the same or `target --restart`")
        self.decoder.load_state_dict(payload["model"])
        if "optimisers" in payload:
            for optimiser, state in zip(self.optimisers, payload["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        self.step, self.drawn, self.pictures = payload["step"], payload["drawn"], payload["pictures"]
        self.spent_s, self.decay_from = payload["spent_s"], payload["decay_from"]
        self.fresh_from = payload["fresh_from"]

    def factor(self) -> float:
        """Of the learning rates: up over WARMUP steps, level, and down to zero with --decay_pictures."""
        rise = min((self.step - self.fresh_from + 1) / WARMUP, 1.0)
        if self.decay_from is None:
            return rise
        return rise * max(1 - (self.pictures - self.decay_from) / self.args.decay_pictures, 0.0)

    def train_step(self) -> float:
        """One update; its loss."""
        batch, rng = self.args.batch_size, random.Random(f"{STREAM}/{self.drawn}")
        planned, codes = self.codes.batch(STREAM, self.drawn, batch)
        texts = ["" if rng.random() < self.args.dropped else picture.text for picture in planned]
        tokens, wanted = (part.to(self.device) for part in self.prompts.pack(texts, codes))
        factor = self.factor()
        for optimiser, rate in zip(self.optimisers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            optimiser.zero_grad(set_to_none=True)
            optimiser.param_groups[0]["lr"] = rate * factor
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = self.loss(self.decoder, tokens, wanted, self.num_codes)
        loss.backward()
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step, self.drawn, self.pictures = self.step + 1, self.drawn + batch, self.pictures + batch
        return loss.item()

    @torch.no_grad()
    def mean_loss(self, texts: list[str], codes: Tensor) -> float:
        """Nats a code of codes [N, n] under texts, with the current weights."""
        total, size = 0.0, self.args.batch_size
        for i in range(0, len(texts), size):
            tokens, wanted = self.prompts.pack(texts[i : i + size], codes[i : i + size])
            loss = code_loss(self.decoder, tokens.to(self.device), wanted.to(self.device), self.num_codes)
            total += loss.item() * len(texts[i : i + size])
        return total / len(texts)

    def validation(self, count: int) -> dict[str, float]:
        """Nats a code of `count` pictures each, full prompts: the last trained on, new placements, held-out
        pairs; and of new placements under the prompt of another name, and under none."""
        planned, codes = self.codes.batch(STREAM, max(self.drawn - count, 0), count)
        found = {"train": self.mean_loss([picture.text for picture in planned], codes)}
        for label, stream in (("held_out", "held_out"), ("new", "validation")):
            planned, codes = self.codes.sample(stream, count)
            found[label] = self.mean_loss([picture.text for picture in planned], codes)
        found["wrong_text"] = self.mean_loss(wrong_texts(planned), codes)
        found["no_text"] = self.mean_loss([""] * count, codes)
        return {name: round(value, 4) for name, value in found.items()}


def wrong_texts(planned: list[Picture]) -> list[str]:
    """For each picture the bare caption of the next one of another name, in its own style."""
    rows, texts = [picture.row for picture in planned], []
    for index, row in enumerate(rows):
        other = next(r for r in [*rows[index + 1 :], *rows] if r["name"] != row["name"])
        texts.append(caption(row["style"], other["name"], []))
    return texts


def newest(work: Path) -> str:
    """The decayed state where there is one, else the stable one; UserError where there is neither."""
    for name in (DECAYED, STABLE):
        if (work / name).exists():
            return name
    raise UserError(f"{work} holds no {STABLE}: run `train_emoji target --work_dir {work}`")


def start(trainer: Trainer, work: Path) -> Path:
    """Load what is to be continued; the file that progress goes to."""
    if not trainer.args.decay_pictures:
        if saved := load_checkpoint(work / STABLE):
            trainer.resume(saved, STABLE)
        return work / STABLE
    stable, decayed = load_checkpoint(work / STABLE), load_checkpoint(work / DECAYED)
    if stable is None:
        raise UserError(f"--decay_pictures: {work} holds no {STABLE} to decay; train it first")
    if decayed is not None and decayed["decay_from"] == stable["pictures"]:
        trainer.resume(decayed, DECAYED)
    else:
        trainer.resume(stable, STABLE)
        trainer.decay_from = trainer.pictures
    return work / DECAYED


def ended(trainer: Trainer) -> bool:
    """Whether no step follows."""
    args = trainer.args
    if trainer.decay_from is not None:
        return trainer.pictures - trainer.decay_from >= args.decay_pictures
    return trainer.pictures >= args.max_pictures


def run(args: Any) -> None:
    """Train to --max_pictures or the end of the decay; write target.pt or target_decayed.pt, and the log."""
    device, work = use_device(args), Path(args.work_dir)
    if args.restart:
        for name in (STABLE, DECAYED, LOG):
            (work / name).unlink(missing_ok=True)
    trainer = Trainer(args, device)
    path = start(trainer, work)
    began, losses = time.monotonic() - trainer.spent_s, list[float]()
    save, validate = Every(60 * args.checkpoint_minutes), Every(60 * args.validate_minutes)
    with tqdm(desc="target", unit="step", initial=trainer.step) as bar:
        done = ended(trainer)
        while not done:
            losses.append(trainer.train_step())
            bar.update()
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            done, spent = ended(trainer), time.monotonic() - began
            if validate.due() or done:
                row = {"step": trainer.step, "pictures": trainer.pictures, "spent_s": round(spent, 1),
                       "factor": round(trainer.factor(), 4), "loss": round(sum(losses) / len(losses), 4),
                       **trainer.validation(96)}  # fmt: skip
                append_line(work / LOG, json.dumps(row))
                losses.clear()
            if save.due() or done:
                save_checkpoint(path, trainer.payload(spent))
    print(json.dumps({"steps": trainer.step, "pictures": trainer.pictures, "written": str(path)}))
