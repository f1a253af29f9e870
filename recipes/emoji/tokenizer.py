"""Trains the VQGAN of the embedded model on pictures under jitter, each seen once, without a discriminator.

Training begins unquantised. After --warmup_steps the codebook is initialised by k-means on the latents. From
then on rare codes are penalised (Codebook.assign). The weight of this penalty is called the rate; it rises to
--rate over --rate_steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from adt_tree.errors import as_seed
from models.checkpoint.files import append_json
from models.codecs.vq import VQConfig, VQModel, from_uint8, to_uint8
from recipes.emoji.codebook import Codebook
from recipes.emoji.losses import Perceptual, flatness, pixel_error, white_cells
from recipes.emoji.pictures import Pictures
from recipes.emoji.stage import (
    TrainedOptions,
    earlier_state,
    finite,
    main,
    save_checkpoint,
    saved_state,
    use_device,
)
from storage.command_line import declare, option

COMMITMENT = 0.25
VQ = "model.vqmodel."  # prefix of the VQGAN's tensors in a checkpoint
CHUNK = 64  # pictures encoded or decoded at once
WARMUP = 0.02  # share of the run over which the learning rate rises
SAVED, LOG = "tokenizer.pt", "losses_tokenizer.jsonl"


@declare("tokenizer")
class Options(TrainedOptions):
    """Options of the VQ tokenizer."""

    save_steps: int = 500
    batch_size: int = 8
    steps: int = option("steps, earlier runs included", 8000)
    learning_rate: float = option("highest learning rate", 2e-3)
    perceptual: float = option("weight of the perceptual loss", 1.0)
    flat: float = option("weight of the loss that gives cells of the same flat colour the same vector", 0.5)
    base_channels: int = option("channels of the first level", 32)
    channel_multiplier: tuple[int, ...] = option("width of each level", (1, 1, 2))
    num_embeddings: int = option("number of codes", 1024)
    embed_dim: int = option("width of a latent vector", 32)
    warmup_steps: int = option("steps before the codebook is used", 1200)
    rate_steps: int = option("steps over which --rate rises from 0", 600)
    rate: float = option("X: a code's squared distance grows by X * -log(share of the code)", 8.0)


class Tokenizer:
    """A VQGAN, the frequencies of its codes, and the rate. Turns pictures into codes, and back.

    Dimensions: N pictures of P x P pixels, h x w codes per picture, E numbers per latent vector.
    """

    def __init__(self, config: VQConfig, rate: float, device: torch.device) -> None:
        self.model = VQModel(config).to(device)
        self.model.to(memory_format=torch.channels_last)  # 3 times faster on a CPU
        self.model.quantize.requires_grad_(False)
        self.book = Codebook(self.model.quantize.embedding.weight.data)
        self.rate, self.device = rate, device

    @classmethod
    def load(cls, work: Path, device: torch.device) -> Tokenizer:
        """Loads tokenizer.pt of a work folder. Raises UserError if there is none."""
        saved = saved_state(work, "tokenizer")
        tokenizer = cls(VQConfig(**saved["config"]), saved["rate"], device)
        tokenizer.model.load_state_dict(saved["model"])
        tokenizer.book.load_state_dict(saved["book"])
        return tokenizer

    def pixels(self, images: Tensor) -> Tensor:
        """Returns uint8 images [N, P, P, 3] as float32 [N, 3, P, P] in [-1, 1], on the device."""
        return from_uint8(images.to(self.device)).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        """Returns the latent vectors [N, h, w, E] of uint8 images [N, P, P, 3], on the device."""
        return torch.cat([self.model.latents(self.pixels(part)) for part in images.split(CHUNK)])

    def encode(self, images: Tensor) -> Tensor:
        """Returns the codes [N, h, w] int64 of uint8 images [N, P, P, 3], on the CPU."""
        return self.book.assign(self.latents(images), self.rate).cpu()

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Returns the uint8 images [N, P, P, 3] of codes [N, h, w], on the CPU."""
        parts = (self.model.decode(part.to(self.device)) for part in codes.split(CHUNK))
        return torch.cat([to_uint8(part).cpu() for part in parts])


def entropy(codes: Tensor) -> float:
    """Returns the entropy of the codes' frequencies, in nats per code."""
    share = codes.flatten().bincount().double() / max(codes.numel(), 1)
    return abs(torch.special.xlogy(share, share).sum().item())


def figures(tokenizer: Tokenizer, images: Tensor) -> dict[str, float]:
    """Returns figures of the codes of uint8 images [N, P, P, 3] and of the images decoded from them.

    These are PSNR in dB (mean over images), mean absolute error in 8-bit levels, entropies in nats per code,
    and shares of cells.
    """
    codes = tokenizer.encode(images)
    error = tokenizer.decode(codes).float() - images.float()
    mse = error.square().flatten(1).mean(1).clamp(min=1e-3)
    white = white_cells(from_uint8(images), images.shape[1] // codes.shape[1])
    return {
        "psnr_db": (10 * (255**2 / mse).log10()).mean().item(),
        "l1_levels": error.abs().mean().item(),
        "code_nats": entropy(codes),
        "white_nats": entropy(codes[white]),
        "white_share": white.float().mean().item(),
        "equal_to_left": (codes[:, :, 1:] == codes[:, :, :-1]).float().mean().item(),
        "codes_used": len(codes.unique()),
    }


class Trainer:
    """The tokenizer, the optimiser, the random numbers and the progress of a run."""

    def __init__(self, options: Options, pictures: Pictures, device: torch.device) -> None:
        """Random numbers are generated on the CPU, so that they are the same on every device."""
        torch.manual_seed(as_seed(options.seed))
        self.options, self.pictures = options, pictures
        config = VQConfig(
            base_channels=options.base_channels,
            channel_multiplier=tuple(options.channel_multiplier),
            num_res_blocks=1,
            embed_dim=options.embed_dim,
            latent_channels=options.embed_dim,
            num_embeddings=options.num_embeddings,
            resolution=pictures.size,
        )
        self.tokenizer = Tokenizer(config, options.rate, device)
        self.perceptual = Perceptual().to(device)
        self.perceptual.to(memory_format=torch.channels_last)
        weights = [p for p in self.tokenizer.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            weights, lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4
        )
        self.rng = torch.Generator().manual_seed(as_seed(options.seed))
        self.step, self.spent_s = 0, 0.0
        self.next_picture = 0  # its number in the stream

    @property
    def rate(self) -> float:
        """The rate at this step: 0 during the warm-up, then rising to --rate."""
        return self.options.rate * min(
            max(self.step - self.options.warmup_steps, 0) / self.options.rate_steps, 1.0
        )

    def payload(self, spent_s: float) -> dict:
        """Returns the state that a resumed run and Tokenizer.load need."""
        model = self.tokenizer.model
        return {"model": model.state_dict(), "config": dataclasses.asdict(model.config),
                "rate": self.options.rate, "book": self.tokenizer.book.state_dict(),
                "rng": self.rng.get_state(), "drawn": self.next_picture,
                "optimiser": self.optimiser.state_dict(), "step": self.step, "spent_s": spent_s}  # fmt: skip

    def resume(self, payload: dict) -> None:
        """Continues from a payload; one that `restore` wrote has no optimiser state and no random state."""
        self.tokenizer.model.load_state_dict(payload["model"])
        self.tokenizer.book.load_state_dict(payload["book"])
        if "optimiser" in payload:
            self.optimiser.load_state_dict(payload["optimiser"])
            self.rng.set_state(payload["rng"])
        self.step, self.spent_s, self.next_picture = payload["step"], payload["spent_s"], payload["drawn"]

    def next_pictures(self, count: int) -> Tensor:
        """Returns the next pictures of the training stream, uint8 [count, P, P, 3]."""
        planned = self.pictures.plan("train", range(self.next_picture, self.next_picture + count))
        self.next_picture += count
        return torch.from_numpy(self.pictures.render(planned))

    def start_codebook(self) -> None:
        """Initialises the codes with random latents of new pictures, then by k-means."""
        vectors = self.tokenizer.latents(self.next_pictures(64)).flatten(0, 2)
        rows = torch.randperm(len(vectors), generator=self.rng)[: self.options.num_embeddings]
        self.tokenizer.book.weight.copy_(vectors[rows])
        vectors = self.tokenizer.latents(self.next_pictures(256)).flatten(0, 2)
        self.tokenizer.book.cluster(vectors, 8, self.rng)

    def train_step(self, factor: float) -> dict[str, float]:
        """Updates the weights at `factor` times the learning rate; returns the parts of the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.learning_rate * factor
        if self.step == self.options.warmup_steps:
            self.start_codebook()
        tokenizer, book = self.tokenizer, self.tokenizer.book
        targets = tokenizer.pixels(self.next_pictures(self.options.batch_size))
        vectors = tokenizer.model.latents(targets)
        ground, apart = flatness(vectors, targets)
        commitment, inputs = torch.zeros(()), vectors
        if self.step >= self.options.warmup_steps:
            flat = vectors.detach().flatten(0, 2)
            codes = book.assign(flat, self.rate)
            quantised = tokenizer.model.quantize.embedding(codes).view(vectors.shape)
            commitment = F.mse_loss(vectors, quantised)
            inputs = vectors + (quantised - vectors).detach()  # gradients pass straight through
            book.follow(flat, codes, self.rng)
        output = tokenizer.model.decode_vectors(inputs)
        pixel = pixel_error(output, targets)
        feature = self.perceptual(output.clamp(-1, 1), targets)
        loss = (
            pixel
            + self.options.perceptual * feature
            + COMMITMENT * commitment
            + self.options.flat * (ground + apart)
        )
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tokenizer.model.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        parts = {"pixel": pixel, "feature": feature, "commitment": commitment, "ground": ground,
                 "apart": apart}  # fmt: skip
        return {name: value.item() for name, value in parts.items()}


def cosine(fraction: float) -> float:
    """Returns the factor of the learning rate: linear to 1 over WARMUP, then half a cosine down to 0."""
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (fraction - WARMUP) / (1 - WARMUP)))


def run(options: Options) -> None:
    """Trains for --steps, earlier runs included. Writes tokenizer.pt and the log."""
    device, work = use_device(options), Path(options.work_dir)
    pictures = Pictures(work)
    saved, trainer = earlier_state(options, "tokenizer", LOG), Trainer(options, pictures, device)
    if saved is not None:
        trainer.resume(saved)
    fresh = torch.from_numpy(pictures.render(pictures.plan("validation", range(384))))
    start_s = time.monotonic() - trainer.spent_s
    sums: dict[str, float] = {}
    with tqdm(desc="tokenizer", unit="step", initial=trainer.step, total=options.steps) as bar:
        while trainer.step < options.steps:
            for name, value in trainer.train_step(cosine(trainer.step / options.steps)).items():
                mean = sums.get(name, 0.0) * 0.98  # about that of 50 steps
                sums[name] = mean + finite(value, trainer.step) * 0.02
            bar.update()
            spent, done = time.monotonic() - start_s, trainer.step == options.steps
            if trainer.step % options.save_steps == 0 or done:
                save_checkpoint(work / SAVED, trainer.payload(spent))
                measured = figures(trainer.tokenizer, fresh if done else fresh[:96])
                progress = {"step": trainer.step, "spent_s": round(spent, 1), "rate": trainer.rate}
                append_json(work / LOG, {**progress, **sums, **measured})
    print(json.dumps({"steps": trainer.step, **figures(trainer.tokenizer, fresh)}))


if __name__ == "__main__":
    main(Options, run, __doc__)
