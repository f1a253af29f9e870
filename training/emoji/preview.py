"""Tunes the target to generate two rasters: a preview of 8 x 8 codes, then the picture's 16 x 16.

The preview is the same picture at half its side, encoded by the same tokenizer. The tuned target serves
measurements of models with several rasters; it is no part of the embedded checkpoint. It starts from the
weights that the stage `restore` wrote and sees every picture once.

A cell of the preview has about the rotary position of the cells that it covers, so that heads which attend to
a cell's neighbours attend to it from the start. For this all prompts have one length: PREFIX tokens, padded
on the left.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from models.loading import load
from models.model import Model
from models.spec import LoadOptions
from models.target import Prompt, PromptEncoder
from models.transformer import Decoder, DecoderConfig
from training.emoji.bpe import IMAGE_FIRST
from training.emoji.codes import Codes
from training.emoji.pictures import Picture, Pictures
from training.emoji.target import IGNORED, STABLE, STREAM, Prompts, code_loss
from training.emoji.tokenizer import Tokenizer
from training.loop import load_checkpoint, save_checkpoint, use_device, write_figures
from training.muon import muon_and_adamw

PREFIX = 20  # tokens of every prompt; the longest caption of the data has 19
PAD = 1
SAVED = "preview.pt"
VALIDATED = 96  # pictures of each kind


def grid_of(side: int) -> Grid:
    """Returns the grid of a picture of side x side codes and its preview of half the side."""
    return Grid(side, side, before=(Raster(side // 2, side // 2),))


def padded(prefix: list[int]) -> list[int]:
    """Returns a prompt's tokens, padded to PREFIX. Raises UserError if there are more."""
    if len(prefix) > PREFIX:
        raise UserError(f"a prompt of {len(prefix)} tokens: the preview's target takes at most {PREFIX}")
    return [PAD] * (PREFIX - len(prefix)) + prefix


def place_positions(decoder: Decoder, grid: Grid) -> None:
    """Changes the decoder's rotary table, so that the preview lies over the picture.

    Cell (r, c) of the preview covers the cells (2 r, 2 c) to (2 r + 1, 2 c + 1) of the picture. Its position
    is that of cell (2 r, 2 c) plus one half, so that no cell of the picture has the same.
    """
    table, preview = decoder.rotary, grid.before[0]
    row, column = (torch.arange(preview.size) // preview.width, torch.arange(preview.size) % preview.width)
    before, cells = torch.arange(PREFIX), PREFIX + 2 * (row * grid.width + column) + 0.5
    after = torch.arange(PREFIX, len(table) - preview.size)
    angles = torch.atan2(table[1, :, 0, 1], table[1, :, 0, 0]) * torch.cat((before, cells, after))[:, None]
    cos, sin = angles.cos(), angles.sin()
    decoder.rotary = torch.stack((cos, sin, -sin, cos), dim=-1).unflatten(-1, (2, 2))


def pack(prompts: Prompts, texts: list[str], codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns input tokens [R, T] and the labels [R, T] that they predict, for codes [R, n]."""
    prefix = torch.tensor([padded(prompts.prefix(text)) for text in texts])
    tokens = torch.cat((prefix, codes[:, :-1] + IMAGE_FIRST), dim=1)
    return tokens, torch.cat((torch.full_like(prefix[:, 1:], IGNORED), codes), dim=1)


class Trainer:
    """The data, the model and the optimisers of a run."""

    def __init__(self, args: Any, device: torch.device) -> None:
        work = Path(args.work_dir)
        start = load_checkpoint(work / STABLE)
        if start is None:
            raise UserError(f"{work} has no {STABLE}: run `train_emoji restore --work_dir {work}`")
        tokenizer = Tokenizer.load(work, device)
        self.args, self.device = args, device
        self.num_codes = tokenizer.model.config.num_embeddings
        self.codes = Codes(work, Pictures(work), tokenizer, preview=True)
        self.prompts = Prompts(work / "text_tokenizer.json", self.num_codes)
        self.decoder = Decoder(DecoderConfig(**start["config"]))
        self.decoder.load_state_dict(start["model"])
        place_positions(self.decoder, grid_of(self.codes.pictures.size // 4))
        self.decoder.to(device)
        self.first = start["drawn"]  # number of the first picture in the stream that the target has not seen
        self.optimisers = muon_and_adamw(self.decoder, args.muon_lr, args.adam_lr, args.weight_decay)

    def loss(self, texts: list[str], codes: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per code."""
        tokens, labels = (part.to(self.device) for part in pack(self.prompts, texts, codes))
        return code_loss(self.decoder, tokens, labels, self.num_codes)

    def train_step(self, done: int) -> float:
        """Updates the weights on the next batch, after `done` pictures of this run; returns the loss."""
        args, batch = self.args, self.args.batch_size
        planned, codes = self.codes.batch(STREAM, self.first + done, batch)
        factor = min((done / batch + 1) / args.warmup_steps, 1.0) * (1 - done / args.num_pictures)
        for optimiser, rate in zip(self.optimisers, (args.muon_lr, args.adam_lr), strict=True):
            optimiser.zero_grad(set_to_none=True)
            optimiser.param_groups[0]["lr"] = rate * factor
        loss = self.loss([picture.text for picture in planned], codes)
        loss.backward()
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss.item()

    @torch.no_grad()
    def validation(self, done: int) -> dict[str, float]:
        """Returns losses in nats per code, each of VALIDATED pictures.

        train: the last pictures trained on. new: trained pairs in new placements; preview and image are the
        losses of their two rasters, other_preview that of the image after another picture's preview.
        held_out: pairs left out of training.
        """
        last = self.first + max(done - VALIDATED, 0)
        planned, codes = self.codes.sample("validation", VALIDATED)
        size = grid_of(self.codes.pictures.size // 4).before[0].size
        other = torch.cat((codes.roll(1, 0)[:, :size], codes[:, size:]), dim=1)
        new = self.losses(planned, codes)
        losses = {
            "train": self.losses(*self.codes.batch(STREAM, last, VALIDATED)),
            "new": new,
            "preview": new[:size],
            "image": new[size:],
            "other_preview": self.losses(planned, other)[size:],
            "held_out": self.losses(*self.codes.sample("held_out", VALIDATED)),
        }
        return {name: round(values.mean().item(), 4) for name, values in losses.items()}

    def losses(self, planned: list[Picture], codes: Tensor) -> Tensor:
        """Returns the mean cross-entropy [n] of every position of the codes [N, n]."""
        total = torch.zeros(codes.shape[1])
        for part in range(0, len(codes), self.args.batch_size):
            rows = codes[part : part + self.args.batch_size]
            texts = [picture.text for picture in planned[part : part + self.args.batch_size]]
            tokens, _ = pack(self.prompts, texts, rows)
            features = self.decoder.causal(tokens.to(self.device))[:, PREFIX - 1 :]
            head = self.decoder.head.weight[IMAGE_FIRST : IMAGE_FIRST + self.num_codes]
            logits = F.linear(features, head).transpose(1, 2)
            total += F.cross_entropy(logits, rows.to(self.device), reduction="none").sum(dim=0).cpu()
        return total / len(codes)


def run(args: Any) -> None:
    """Trains on --num_pictures pictures; writes the weights and the figures."""
    device, work = use_device(args), Path(args.work_dir)
    torch.manual_seed(args.seed)
    trainer, losses, begun = Trainer(args, device), list[float](), time.monotonic()
    steps = range(0, args.num_pictures, args.batch_size)
    with tqdm(steps, desc="preview", unit="step") as bar:
        for done in bar:
            losses.append(trainer.train_step(done))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    save_checkpoint(work / SAVED, {"model": trainer.decoder.state_dict(),
                                   "config": dataclasses.asdict(trainer.decoder.config)})  # fmt: skip
    figures = {"pictures": args.num_pictures, "spent_s": round(time.monotonic() - begun, 1),
               "loss_of_last_steps": round(sum(losses[-10:]) / len(losses[-10:]), 4)}  # fmt: skip
    write_figures(work, "preview", {**figures, **trainer.validation(args.num_pictures)})


def tuned_model(work: Path) -> Model:
    """Returns the tuned target as a model that every method decodes with. Raises UserError if there is none.

    Codec, tokenizer and codebook are those of the embedded model, from which it was tuned.
    """
    saved = load_checkpoint(work / SAVED)
    if saved is None:
        raise UserError(f"{work} has no {SAVED}: run `train_emoji preview --work_dir {work}`")
    base = load("emoji", LoadOptions(device="cpu", precision="fp32", drafter_path=None))
    decoder, grid = Decoder(DecoderConfig(**saved["config"])), grid_of(base.grid.width)
    decoder.load_state_dict(saved["model"])
    place_positions(decoder, grid)
    decoder.cut_head(base.first_code, base.num_codes)

    def encode(text: str) -> Prompt:
        prompt = base.encode(text)
        return Prompt(padded(prompt.tokens(0)), padded(prompt.tokens(1)))

    prompts = PromptEncoder(encode, base.first_code, base.num_codes)
    decoder.eval().requires_grad_(False)
    return dataclasses.replace(base, grid=grid, decoder=decoder, prompts=prompts, drafter_net=None)
