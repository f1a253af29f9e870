"""Trains the target to predict the image codes of captions, by cross-entropy.

Every picture is seen once. The learning rates rise, stay level, and fall to zero over the last pictures
(--decay_pictures). Some prompts are empty, for guidance. Hidden matrices are trained by Muon, the rest by
AdamW. bf16 and --compile make training three times faster on a CPU with AMX; on a CPU without bf16 units bf16
is a hundred times slower.

A sequence is [bos] text [separator, image begin] codes, or [bos, image begin] codes for an empty prompt. It
is padded on the right, where causal attention never looks.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer as TextTokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from adt_tree.errors import as_seed, refuse_other
from models.checkpoint.files import append_json
from models.decoder.config import DecoderConfig
from models.decoder.transformer import Decoder
from recipes.emoji.bpe import IMAGE_FIRST, Layout, caption
from recipes.emoji.codes import Codes
from recipes.emoji.pictures import Picture, Pictures
from recipes.emoji.stage import (
    TrainedOptions,
    earlier_state,
    finite,
    main,
    save_checkpoint,
    use_device,
)
from recipes.emoji.tokenizer import Tokenizer
from storage.command_line import declare, option
from training.muon import muon_and_adamw

BOS = 0
LENGTH_STEP = 16  # sequences are padded to a multiple of it, so that --compile meets few shapes
IGNORED = -100  # label where no code is predicted
WARMUP = 100  # steps
SAVED, LOG = "target.pt", "losses_target.jsonl"
STREAM = "train0"  # name of the stream of training pictures, on which every picture depends


@declare("target")
class Options(TrainedOptions):
    """Options of the target."""

    max_pictures: int = option("pictures to train on, earlier runs included", 300_000)
    decay_pictures: int = option("last pictures, over which the learning rates fall to 0", 0)
    precision: str = option("bf16: autocast, and Muon's iterations in bf16", "fp32", choices=("fp32", "bf16"))
    compile: bool = option("use torch.compile, which takes a minute at the start", False)
    validate_steps: int = option("steps between validations", 750)
    muon_lr: float = option("learning rate of hidden matrices", 6e-3)
    adam_lr: float = option("learning rate of embedding, head and norms", 3e-3)
    weight_decay: float = option("W: a step shrinks hidden matrices by W * muon_lr", 0.02)
    dropped: float = option("share of prompts that training replaces by an empty one", 0.1)
    hidden_size: int = option("width of the decoder", 256)
    num_layers: int = option("layers of the decoder", 10)
    num_heads: int = option("attention heads of a layer", 4)
    intermediate_size: int = option("width of a layer's MLP", 704)
    max_positions: int = option("longest sequence, in tokens", 512)


class Prompts:
    """Encodes prompts as token ids, which end with the image-begin token."""

    def __init__(self, tokenizer_path: Path, num_codes: int) -> None:
        self.tokenizer = TextTokenizer.from_file(str(tokenizer_path))
        self.layout = Layout(num_codes)

    def prefix(self, text: str) -> list[int]:
        """Returns the token ids of a caption; for an empty one, those of the unconditional branch."""
        if not text:
            return [BOS, self.layout.image_begin]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [BOS, *ids, self.layout.separator, self.layout.image_begin]

    def pack(self, texts: list[str], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns input tokens [R, T] and the labels [R, T] they predict, for codes [R, n].

        A row holds the prefix, all codes but the last, and padding. A label is a code, counted from 0, or
        IGNORED.
        """
        prefixes, num = [self.prefix(text) for text in texts], codes.shape[1]
        length = -(-(max(map(len, prefixes)) + num - 1) // LENGTH_STEP) * LENGTH_STEP
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        labels = torch.full((len(texts), length), IGNORED)
        for row, prefix in enumerate(prefixes):
            start = len(prefix)
            tokens[row, :start] = torch.tensor(prefix)
            tokens[row, start : start + num - 1] = codes[row, :-1] + IMAGE_FIRST
            labels[row, start - 1 : start - 1 + num] = codes[row]
        return tokens, labels


def code_loss(decoder: Decoder, tokens: Tensor, labels: Tensor, num_codes: int) -> Tensor:
    """Returns the mean cross-entropy in nats per code, for tokens and labels [R, T].

    The softmax is over image codes alone.
    """
    head = decoder.head.get_parameter("weight")[IMAGE_FIRST : IMAGE_FIRST + num_codes]
    logits = F.linear(decoder.causal(tokens), head)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def initialise(decoder: Decoder) -> None:
    """Samples weights from normal distributions.

    The standard deviation is 0.04 in the blocks and 0.02 outside; for matrices that write to the residual
    stream it is divided by the square root of twice the depth.
    """
    depth = decoder.config.num_layers
    for name, param in decoder.named_parameters():
        if param.ndim == 2 and "qk_" not in name:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.04 / (2 * depth) ** (0.5 * residual) if "blocks" in name else 0.02
            nn.init.normal_(param, std=std)


class Trainer:
    """The data, the model, the optimisers and the progress of a run."""

    def __init__(self, options: Options, device: torch.device) -> None:
        work = Path(options.work_dir)
        torch.manual_seed(as_seed(options.seed))
        self.options, self.device = options, device
        tokenizer = Tokenizer.load(work, device)
        self.num_codes = tokenizer.model.config.num_embeddings
        self.codes = Codes(work, Pictures(work), tokenizer)
        self.prompts = Prompts(work / "text_tokenizer.json", self.num_codes)
        config = DecoderConfig(
            vocab_size=self.prompts.tokenizer.get_vocab_size(),
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            max_positions=options.max_positions,
            qk_norm=True,
        )
        self.decoder = Decoder(config)
        initialise(self.decoder)
        self.decoder.to(device)
        self.half = options.precision == "bf16"
        dtype = torch.bfloat16 if self.half else torch.float32
        self.optimisers = muon_and_adamw(
            self.decoder, options.muon_lr, options.adam_lr, options.weight_decay, dtype
        )
        self.loss = torch.compile(code_loss, dynamic=False) if options.compile else code_loss
        self.step, self.spent_s = 0, 0.0
        self.next_picture = 0  # its number in the stream
        self.num_pictures = 0  # trained on, all runs together
        self.fresh_from = 0  # step at which the optimisers began without history

    def payload(self, spent_s: float) -> dict:
        """Returns the state that a resumed run and the export need."""
        return {"model": self.decoder.state_dict(), "step": self.step, "drawn": self.next_picture,
                "pictures": self.num_pictures, "spent_s": spent_s, "fresh_from": self.fresh_from,
                "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
                "config": dataclasses.asdict(self.decoder.config), "codes": self.codes.digest}  # fmt: skip

    def resume(self, payload: dict) -> None:
        """Continues from a payload; one that `restore` wrote has no optimiser states.

        Raises UserError if it was trained on other codes, or has another shape.
        """
        remedy = "give the same tokenizer.pt and shape, or give --restart"
        refuse_other(payload, {"codes": self.codes.digest}, f"{SAVED} was trained with", remedy)
        shape = json.loads(json.dumps(dataclasses.asdict(self.decoder.config)))
        saved = json.loads(json.dumps(payload["config"]))  # with lists for tuples, as JSON files have them
        shape = {name: shape.get(name) for name in saved}  # an older checkpoint lacks the fields added since
        refuse_other(saved, shape, f"{SAVED} was trained with", remedy)
        self.decoder.load_state_dict(payload["model"])
        if "optimisers" in payload:
            for optimiser, state in zip(self.optimisers, payload["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        self.step, self.next_picture = payload["step"], payload["drawn"]
        self.num_pictures = payload["pictures"]
        self.spent_s, self.fresh_from = payload["spent_s"], payload["fresh_from"]

    def factor(self) -> float:
        """Returns the factor of the learning rates at this step.

        It rises over WARMUP steps, stays at 1, and falls linearly to 0 over the last --decay_pictures.
        """
        rise = min((self.step - self.fresh_from + 1) / WARMUP, 1.0)
        left, decay = self.options.max_pictures - self.num_pictures, self.options.decay_pictures
        return rise * min(max(left, 0) / decay, 1.0) if decay else rise

    def train_step(self) -> float:
        """Updates the weights on the next pictures; returns the loss."""
        batch, rng = self.options.batch_size, random.Random(f"{STREAM}/{self.next_picture}")
        planned, codes = self.codes.batch(STREAM, self.next_picture, batch)
        texts = ["" if rng.random() < self.options.dropped else picture.text for picture in planned]
        tokens, labels = (part.to(self.device) for part in self.prompts.pack(texts, codes))
        factor = self.factor()
        for optimiser, rate in zip(
            self.optimisers, (self.options.muon_lr, self.options.adam_lr), strict=True
        ):
            optimiser.zero_grad(set_to_none=True)
            optimiser.param_groups[0]["lr"] = rate * factor
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = self.loss(self.decoder, tokens, labels, self.num_codes)
        loss.backward()
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        self.next_picture += batch
        self.num_pictures += batch
        return loss.item()

    @torch.no_grad()
    def mean_loss(self, texts: list[str], codes: Tensor) -> float:
        """Returns the loss, in nats per code, of codes [N, n] after the prompts `texts`."""
        total, size = 0.0, self.options.batch_size
        for i in range(0, len(texts), size):
            tokens, labels = self.prompts.pack(texts[i : i + size], codes[i : i + size])
            loss = code_loss(self.decoder, tokens.to(self.device), labels.to(self.device), self.num_codes)
            total += loss.item() * len(texts[i : i + size])
        return total / len(texts)

    def validation(self, count: int) -> dict[str, float]:
        """Returns the loss, in nats per code, of `count` pictures of each kind.

        train: the last ones trained on. held_out: of held-out pairs. new: of trained pairs in new placements;
        wrong_text: the same after the prompt of another name, no_text: after an empty prompt.
        """
        planned, codes = self.codes.batch(STREAM, max(self.next_picture - count, 0), count)
        losses = {"train": self.mean_loss([picture.text for picture in planned], codes)}
        for label, stream in (("held_out", "held_out"), ("new", "validation")):
            planned, codes = self.codes.sample(stream, count)
            losses[label] = self.mean_loss([picture.text for picture in planned], codes)
        losses["wrong_text"] = self.mean_loss(wrong_texts(planned), codes)
        losses["no_text"] = self.mean_loss([""] * count, codes)
        return {name: round(value, 4) for name, value in losses.items()}


def wrong_texts(planned: list[Picture]) -> list[str]:
    """Returns for each picture a caption of its style with the name of a later picture."""
    rows, texts = [picture.row for picture in planned], []
    for index, row in enumerate(rows):
        other = next(r for r in [*rows[index + 1 :], *rows] if r["name"] != row["name"])
        texts.append(caption(row["style"], other["name"], []))
    return texts


def run(options: Options) -> None:
    """Trains to --max_pictures, earlier runs included; writes the state and the log."""
    device, work = use_device(options), Path(options.work_dir)
    saved, trainer = earlier_state(options, "target", LOG), Trainer(options, device)
    if saved is not None:
        trainer.resume(saved)
    start_s, losses = time.monotonic() - trainer.spent_s, list[float]()
    with tqdm(desc="target", unit="step", initial=trainer.step) as bar:
        done = trainer.num_pictures >= options.max_pictures
        while not done:
            losses.append(finite(trainer.train_step(), trainer.step))
            bar.update()
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            done, spent = trainer.num_pictures >= options.max_pictures, time.monotonic() - start_s
            if trainer.step % options.validate_steps == 0 or done:
                row = {"step": trainer.step, "pictures": trainer.num_pictures, "spent_s": round(spent, 1),
                       "factor": round(trainer.factor(), 4), "loss": round(sum(losses) / len(losses), 4),
                       **trainer.validation(96)}  # fmt: skip
                append_json(work / LOG, row)
                losses.clear()
            if trainer.step % options.save_steps == 0 or done:
                save_checkpoint(work / SAVED, trainer.payload(spent))
    print(json.dumps({"steps": trainer.step, "pictures": trainer.num_pictures, "written": str(work / SAVED)}))


if __name__ == "__main__":
    main(Options, run, __doc__)
